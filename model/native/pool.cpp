#include "pool.h"

#include <signal.h>

#include <algorithm>
#include <map>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mr {
namespace {

using Clock = Workers::Clock;

// How long an idle worker, or a caller whose tasks ran out, looks before it sleeps: longer than the gaps inside one
// forward pass, and short enough that resting costs nothing and a preempted partner soon gets the core. Never a yield:
// where somebody else is on the core, Linux 6.18 takes a whole turn from who yields, and the worker missed its passes.
constexpr std::chrono::microseconds kSpin{60};
constexpr std::chrono::microseconds kRoused{500};  // and one that was roused: a verification's planning takes less

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");  // to the core's other thread, not to the scheduler
#else
    std::this_thread::yield();
#endif
}

template <class Ready>
bool spin(const Ready& ready, Clock::time_point until = {}) {
    const auto end = std::max(Clock::now() + kSpin, until);
    do {
        for (int i = 0; i < 64; ++i) {
            if (ready()) return true;
            pause();
        }
    } while (Clock::now() < end);
    return false;
}

}  // namespace

std::shared_ptr<Workers> Workers::of(int threads) {
    static std::mutex mutex;
    static std::map<int, std::weak_ptr<Workers>> known;
    std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<Workers> workers = known[threads].lock();
    if (!workers) known[threads] = workers = std::make_shared<Workers>(threads);
    return workers;
}

Workers::Workers(int threads) {
    // Signals are for the program's own threads: a worker that took one would leave its handler waiting.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < threads; ++i) threads_.emplace_back([this, i] { worker(i); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Workers::~Workers() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (auto& t : threads_) t.join();
}

bool Workers::ready() const {
    const uint64_t t = ticket_.load(std::memory_order_acquire);
    return uint32_t(t) < uint32_t(t >> 32) || stop_.load(std::memory_order_relaxed);
}

bool Workers::work(int thread) {
    bool any = false;
    for (;;) {
        uint64_t t = ticket_.load(std::memory_order_acquire);
        if (uint32_t(t) >= uint32_t(t >> 32)) return any;
        t = ticket_.fetch_add(1, std::memory_order_acq_rel);
        if (uint32_t(t) >= uint32_t(t >> 32)) return any;
        any = true;
        call_.load(std::memory_order_relaxed)(ctx_.load(std::memory_order_relaxed), int(uint32_t(t)), thread);
        if (pending_.fetch_sub(1, std::memory_order_seq_cst) == 1 && caller_waits_.load(std::memory_order_seq_cst)) {
            std::lock_guard<std::mutex> lock(mutex_);
            done_.notify_one();
        }
    }
}

bool Workers::run(int tasks, Call call, const void* ctx) {
    if (taken_.exchange(true, std::memory_order_acquire)) return false;
    call_.store(call, std::memory_order_relaxed);
    ctx_.store(ctx, std::memory_order_relaxed);
    pending_.store(tasks, std::memory_order_relaxed);
    ticket_.store(uint64_t(tasks) << 32, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
        { std::lock_guard<std::mutex> lock(mutex_); }  // a worker between its last look and its wait holds the lock
        wake_.notify_all();
    }
    work(0);
    const auto finished = [this] { return pending_.load(std::memory_order_seq_cst) == 0; };
    if (!spin(finished)) {
        std::unique_lock<std::mutex> lock(mutex_);
        caller_waits_.store(true, std::memory_order_seq_cst);
        done_.wait(lock, finished);
        caller_waits_.store(false, std::memory_order_relaxed);
    }
    taken_.store(false, std::memory_order_release);
    return true;
}

Workers::Clock::time_point Workers::roused_until() const {
    return Clock::time_point(Clock::duration(roused_until_.load(std::memory_order_seq_cst)));
}

void Workers::rouse() {
    roused_until_.store((Clock::now() + kRoused).time_since_epoch().count(), std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
}

void Workers::worker(int thread) {
    const auto called = [this] { return ready(); };
    while (!stop_.load(std::memory_order_relaxed)) {
        if (spin(called, roused_until())) {
            work(thread);
            continue;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        // Once awake it looks around: what it was woken for may be done already, or still to come.
        if (!ready() && Clock::now() >= roused_until()) wake_.wait(lock);
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
}

}  // namespace mr

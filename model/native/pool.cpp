#include "pool.h"

#include <signal.h>

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mr {
namespace {

// How long an idle worker, or a caller whose tasks ran out, looks before it sleeps: longer than the gaps inside one
// forward pass, and short enough that resting costs nothing and a preempted partner soon gets the core.
constexpr std::chrono::microseconds kSpin{60};

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

template <class Ready>
bool spin(const Ready& ready) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 64; ++i) {
            if (ready()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
    // Signals are for the program's own threads: a worker that took one would leave its handler waiting.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < threads_; ++i) workers_.emplace_back([this, i] { worker(i); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (auto& w : workers_) w.join();
}

bool Pool::ready() const {
    const uint64_t t = ticket_.load(std::memory_order_acquire);
    return uint32_t(t) < uint32_t(t >> 32) || stop_.load(std::memory_order_relaxed);
}

bool Pool::work(int thread) {
    bool any = false;
    for (;;) {
        uint64_t t = ticket_.load(std::memory_order_acquire);
        if (uint32_t(t) >= uint32_t(t >> 32)) return any;
        t = ticket_.fetch_add(1, std::memory_order_acq_rel);
        if (uint32_t(t) >= uint32_t(t >> 32)) return any;
        any = true;
        call_.load(std::memory_order_relaxed)(ctx_.load(std::memory_order_relaxed), int(uint32_t(t)), thread);
        if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            std::lock_guard<std::mutex> lock(mutex_);
            if (caller_waits_) done_.notify_one();
        }
    }
}

void Pool::dispatch(int tasks, Call call, const void* ctx) {
    call_.store(call, std::memory_order_relaxed);
    ctx_.store(ctx, std::memory_order_relaxed);
    pending_.store(tasks, std::memory_order_relaxed);
    ticket_.store(uint64_t(tasks) << 32, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
        { std::lock_guard<std::mutex> lock(mutex_); }  // a worker between its last look and its wait holds the lock
        wake_.notify_all();
    }
    work(0);
    const auto finished = [this] { return pending_.load(std::memory_order_acquire) == 0; };
    if (spin(finished)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    caller_waits_ = true;
    done_.wait(lock, finished);
    caller_waits_ = false;
}

void Pool::worker(int thread) {
    while (!stop_.load(std::memory_order_relaxed)) {
        if (spin([this] { return ready(); })) {
            work(thread);
            continue;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [this] { return ready(); });
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
}

}  // namespace mr

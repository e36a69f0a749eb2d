// A few persistent threads. `Pool::run(n, f)` calls f(task, thread) for every task in [0, n) and returns when all are done;
// the caller works too, so one thread means no other thread and no atomic operation at all.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace mr {

// Multiply-adds below which work stays on one thread, about 2 ms of one core: waking others and waiting for them took a
// third more processor time and saved no wall time where the cores had other work. Measured at decode.
constexpr double kWorthSharing = 70e6;

// A pass for one or two sequences serves few clients, so that the other cores have little else to do: it is then shared
// out from this part of the above on, and from less where it verifies drafts, of two tokens already: 0.28 ms on two
// threads, 0.44 on one.
constexpr int kFewSequences = 2;
constexpr double kFewShare = 0.25, kFewDrafted = 0.1;

// The threads themselves. Whoever asks for as many in one process shares them: a model and its drafter take turns, and
// threads of both would keep each other from the cores.
class Workers {
public:
    using Clock = std::chrono::steady_clock;
    using Call = void (*)(const void* ctx, int task, int thread);

    static std::shared_ptr<Workers> of(int threads);
    explicit Workers(int threads);
    ~Workers();
    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;

    bool run(int tasks, Call call, const void* ctx);  // false: somebody else has them, nothing was done
    void rouse();  // there will be work in a moment

private:
    void worker(int thread);
    bool work(int thread);  // claims tasks until none is left; false if there was none
    bool ready() const;
    Clock::time_point roused_until() const;

    // One word holds the whole claim state, tasks << 32 | next, so that a late worker can never mistake one job's
    // index for another's: a claimed index below the task count of the same word belongs to the job now published,
    // and that job cannot end, nor be replaced, before the claimed task is done.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<const void*> ctx_{nullptr};
    alignas(64) std::atomic<int> pending_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::atomic<bool> taken_{false};
    std::atomic<int64_t> roused_until_{0};  // in the clock's ticks
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::atomic<bool> caller_waits_{false};
    std::vector<std::thread> threads_;
};

class Pool {
public:
    explicit Pool(int threads)
        : threads_(threads < 1 ? 1 : threads), workers_(threads_ > 1 ? Workers::of(threads_) : nullptr) {}

    int size() const { return threads_; }
    int threads() const { return active_; }

    // Threads that sleep take a while to wake, on a virtual machine longer than a small product: so wake them early.
    void rouse() {
        if (workers_) workers_->rouse();
    }

    // What follows is so small that waking others costs more than they save, or it is not. Callers take turns.
    void alone(bool alone) { active_ = alone ? 1 : threads_; }

    template <class F>
    void run(int tasks, const F& f) {
        const auto call = [](const void* ctx, int task, int thread) { (*static_cast<const F*>(ctx))(task, thread); };
        if (active_ > 1 && tasks > 1 && workers_->run(tasks, call, &f)) return;
        for (int i = 0; i < tasks; ++i) f(i, 0);
    }

private:
    const int threads_;
    int active_ = threads_;
    std::shared_ptr<Workers> workers_;
};

}  // namespace mr

// The threads of one forward pass.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <sched.h>

#include "intrinsics.hpp"

namespace warren {

// Pins the calling thread to one core during its lifetime.
class Pinned {
   public:
    explicit Pinned(int core) : is_set_(core >= 0 && sched_getaffinity(0, sizeof before_, &before_) == 0) {
        if (!is_set_) return;
        cpu_set_t only;
        CPU_ZERO(&only);
        CPU_SET(core, &only);
        sched_setaffinity(0, sizeof only, &only);
    }
    ~Pinned() {
        if (is_set_) sched_setaffinity(0, sizeof before_, &before_);
    }
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;

   private:
    cpu_set_t before_;
    const bool is_set_;
};

// Denormal numbers are zero in the calling thread during its lifetime, as operands and as results.
class FlushDenormals {
   public:
    FlushDenormals() : before_(arithmetic_modes()) { set_arithmetic_modes(before_ | kFlushesDenormals); }
    ~FlushDenormals() { set_arithmetic_modes(before_); }
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;

   private:
    const uint64_t before_;
};

// The stage that the calling thread has reached: see `Team::share`. Stages are counted from run to run.
static thread_local uint32_t reached_stage = 0;  // not inline: libraries loaded together would share it

// Threads that run the same code, which consists of stages of tasks.
//
// A stage ends when its tasks have ended, whichever threads they were run by. Nobody waits for a thread without a task: if
// the system runs something else on its core, the others go on, and the thread skips the stages that it finds completed.
// Code between two stages must therefore only prepare what the thread itself needs for its next tasks.
class Team {
   public:
    // A team as large as the number of cores pins each thread to its own core. Otherwise the system tends to place
    // threads that wake one another on the same core, where they wait for each other.
    explicit Team(int size) : size_(size) {
        cpu_set_t allowed;
        if (sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) == size)
            for (int core = 0; core < CPU_SETSIZE; core++)
                if (CPU_ISSET(core, &allowed)) cores_.push_back(core);
        for (int index = 1; index < size; index++) members_.emplace_back([this, index] { serve(index); });
    }

    ~Team() {
        is_closing_ = true;
        announce();
        for (auto& member : members_) member.join();
    }

    int size() const { return size_; }

    // Runs `work` on the caller and on all threads of the team that are free, and returns when all have ended.
    void run(const std::function<void()>& work) {
        const std::lock_guard<std::mutex> alone(mutex_);
        const Pinned pinned(core(0));
        const FlushDenormals flush;
        work_ = &work;
        first_stage_ = reached_stage = stage();
        inside_.store(0, std::memory_order_release);
        announce();
        work();
        inside_.fetch_or(kIsClosed, std::memory_order_acq_rel);
        for (unsigned inside; (inside = inside_.load(std::memory_order_acquire)) != kIsClosed;) await(inside_, inside);
    }

    // Runs tasks 0 .. count - 1 on the team. A single task is the caller's, because waking a thread takes longer than
    // the operations on one row.
    template <class Task>
    void each(int count, const Task& task) {
        if (count != 1) return run([&] { share(count, task); });
        const FlushDenormals flush;
        task(0);
    }

    // A stage: tasks 0 .. count - 1, each run once by the first available thread. Called by all threads of the team;
    // returns when all tasks have ended.
    template <class Task>
    void share(int count, const Task& task) {
        const uint32_t stage = reached_stage++;
        const uint32_t end = std::max(count, 1);  // a stage without tasks has an empty one, which ends it
        for (uint64_t ticket = tickets_.load(std::memory_order_acquire); uint32_t(ticket >> 32) == stage;) {
            const uint32_t index = static_cast<uint32_t>(ticket);
            if (index >= end) return await_end(stage);
            if (!tickets_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
            if (count > 0) task(static_cast<int>(index));
            if (num_ended_.fetch_add(1, std::memory_order_acq_rel) + 1 == end) return advance(stage + 1);
            ticket = tickets_.load(std::memory_order_acquire);
        }
    }

   private:
    // A thread sleeps after about 20 us without work, because the engine may need the core.
    static constexpr int kSpins = 1000;
    static constexpr unsigned kIsClosed = 1u << 31;

    uint32_t stage() const { return tickets_.load(std::memory_order_acquire) >> 32; }

    void advance(uint32_t next) {
        num_ended_.store(0, std::memory_order_relaxed);
        tickets_.store(uint64_t{next} << 32, std::memory_order_release);
        num_advances_.fetch_add(1, std::memory_order_release);
        num_advances_.notify_all();
    }

    void await_end(uint32_t stage) const {
        for (int spin = 0; spin < kSpins; spin++) {
            if (this->stage() != stage) return;
            _mm_pause();
        }
        for (;;) {
            const uint32_t old = num_advances_.load(std::memory_order_acquire);
            if (this->stage() != stage) return;
            num_advances_.wait(old);
        }
    }

    void announce() {
        calls_.fetch_add(1, std::memory_order_release);
        calls_.notify_all();
    }

    static void await(const std::atomic<unsigned>& value, unsigned old) {
        for (int spin = 0; spin < kSpins; spin++) {
            if (value.load(std::memory_order_acquire) != old) return;
            _mm_pause();
        }
        while (value.load(std::memory_order_acquire) == old) value.wait(old);
    }

    int core(int index) const { return cores_.empty() ? -1 : cores_[index]; }

    void serve(int index) {
        const Pinned pinned(core(index));
        const FlushDenormals flush;
        for (unsigned call = 0;;) {
            await(calls_, call);
            call = calls_.load(std::memory_order_acquire);
            if (is_closing_) return;
            if (!enter()) continue;
            reached_stage = first_stage_;
            (*work_)();
            inside_.fetch_sub(1, std::memory_order_acq_rel);
            inside_.notify_all();
        }
    }

    // Whether the calling thread takes part in a run, which then does not end before the thread has left it.
    bool enter() {
        unsigned inside = inside_.load(std::memory_order_acquire);
        while (!(inside & kIsClosed))
            if (inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) return true;
        return false;
    }

    const int size_;
    std::vector<int> cores_;  // one for each thread; empty if they are not pinned
    std::vector<std::thread> members_;
    std::mutex mutex_;
    const std::function<void()>* work_ = nullptr;
    uint32_t first_stage_ = 0;  // of the run
    std::atomic<bool> is_closing_{false};
    alignas(64) std::atomic<unsigned> calls_{0};
    alignas(64) std::atomic<unsigned> inside_{kIsClosed};  // the members in the run
    alignas(64) std::atomic<uint64_t> tickets_{0};         // the stage, in the upper half, and its next task
    alignas(64) std::atomic<uint32_t> num_ended_{0};       // tasks of the stage
    alignas(64) std::atomic<uint32_t> num_advances_{0};    // what sleeping threads watch
};

}  // namespace warren

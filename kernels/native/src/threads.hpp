// The threads of one forward pass: they run the same code in parallel and meet at barriers.
#pragma once

#include <atomic>
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

    // Runs `work(member)` on every thread of the team, where 0 is the caller, and returns when all have ended.
    void run(const std::function<void(int)>& work) {
        const std::lock_guard<std::mutex> alone(mutex_);
        const Pinned pinned(core(0));
        const FlushDenormals flush;
        work_ = &work;
        announce();
        work(0);
        barrier();
    }

    // Tasks 0 .. count - 1, each run once by the first available thread; ends at a barrier.
    template <class Task>
    void share(int count, const Task& task) {
        for (int index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < count;) task(index);
        barrier();
    }

   private:
    // A thread sleeps after about 20 us without work, because the engine may need the core.
    static constexpr int kSpins = 1000;

    void barrier() {
        const unsigned round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            round_.notify_all();
        } else {
            await(round_, round);
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
        for (unsigned call = 0;; call++) {
            await(calls_, call);
            if (is_closing_) return;
            (*work_)(index);
            barrier();
        }
    }

    const int size_;
    std::vector<int> cores_;  // one for each thread; empty if they are not pinned
    std::vector<std::thread> members_;
    std::mutex mutex_;
    const std::function<void(int)>* work_ = nullptr;
    std::atomic<bool> is_closing_{false};
    alignas(64) std::atomic<unsigned> calls_{0};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> round_{0};
};

}  // namespace warren

// Stages of a team whose threads are late: exits with 0 if each task of each stage ran once, after those of the stage
// before.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "threads.hpp"

int main(int, char** arguments) {
    constexpr int kMaxTasks = 9;
    warren::Team team(std::atoi(arguments[1]));
    std::mt19937 random(std::atoi(arguments[2]));
    int num_wrong = 0;
    for (int run = 0; run < 300; run++) {
        std::vector<int> counts(random() % 40 + 1);
        for (int& count : counts) count = random() % (kMaxTasks + 1);
        const uint32_t late = random();
        // Plain numbers: a stage's tasks may read what the stage before has written.
        std::vector<int> done(counts.size() * kMaxTasks);
        std::atomic<int> num_early{0};
        team.run([&] {
            for (size_t stage = 0; stage < counts.size(); stage++) {
                if ((late >> stage % 32 & 1) && std::hash<std::thread::id>{}(std::this_thread::get_id()) % 2)
                    std::this_thread::yield();
                team.share(counts[stage], [&](int task) {
                    if (late >> task % 32 & 1) std::this_thread::yield();
                    const int* before = done.data() + (stage ? stage - 1 : 0) * kMaxTasks;
                    for (int i = 0; stage && i < counts[stage - 1]; i++) num_early += before[i] != 1;
                    done[stage * kMaxTasks + task]++;
                });
            }
        });
        num_wrong += num_early;
        for (size_t stage = 0; stage < counts.size(); stage++)
            for (int task = 0; task < counts[stage]; task++) num_wrong += done[stage * kMaxTasks + task] != 1;
    }
    std::printf("%d\n", num_wrong);
    return num_wrong != 0;
}

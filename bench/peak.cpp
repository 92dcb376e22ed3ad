// Prints the peak rates of this machine: operations per second of float32 multiply-adds in registers, and bytes per
// second that are read from memory. Then it waits for a line, and measures again.
//   peak NUM_THREADS SECONDS
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <sys/mman.h>

#ifdef __AVX512F__
constexpr int kBytes = 64;
#else
constexpr int kBytes = 32;
#endif
constexpr int kLanes = kBytes / sizeof(float);
// More than the latency of a multiply-add times those that begin in each cycle; all are in registers.
constexpr int kChains = 12;
constexpr std::size_t kReadBytes = std::size_t{512} << 20;
typedef float Vector __attribute__((vector_size(kBytes)));
using Clock = std::chrono::steady_clock;

// Keeps results alive that nobody needs.
std::atomic<float> sink;

static Vector broadcast(float value) { return value - Vector{}; }

static double multiply_adds() {
    volatile float factor = 0.999f, added = 0.001f;
    Vector sums[kChains];
    for (Vector& sum : sums) sum = broadcast(added);  // a new value to the compiler each time
    const Vector a = broadcast(factor), b = broadcast(added);
    constexpr int kRounds = 20000;
    for (int round = 0; round < kRounds; ++round)
#pragma GCC unroll 16
        for (int k = 0; k < kChains; ++k) sums[k] = sums[k] * a + b;
    for (const Vector& sum : sums) sink = sum[0];
    return 2.0 * kRounds * kChains * kLanes;
}

// Memory in huge pages, if the system has them, as the weights are: otherwise the translation of addresses is measured.
static Vector* allocate(std::size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    madvise(memory, bytes, MADV_HUGEPAGE);
    auto* values = static_cast<Vector*>(memory);
    for (std::size_t i = 0; i < bytes / kBytes; ++i) values[i] = broadcast(1.0f);
    return values;
}

static double read(const Vector* values, std::size_t count) {
    constexpr std::size_t kAtOnce = 8;
    Vector sums[kAtOnce] = {};
    for (std::size_t i = 0; i + kAtOnce <= count; i += kAtOnce)
#pragma GCC unroll 16
        for (std::size_t k = 0; k < kAtOnce; ++k) sums[k] += values[i + k];
    for (const Vector& sum : sums) sink = sum[0];
    return double(count * kBytes);
}

// The sum of all threads' rates, each repeating its work for some seconds.
template <typename Work>
static double rate(int num_threads, double seconds, Work work) {
    std::vector<double> rates(num_threads);
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t)
        threads.emplace_back([&, t] {
            double done = 0, taken = 0;
            const auto began = Clock::now();
            while (taken < seconds) {
                done += work(t);
                taken = std::chrono::duration<double>(Clock::now() - began).count();
            }
            rates[t] = done / taken;
        });
    double sum = 0;
    for (int t = 0; t < num_threads; ++t) {
        threads[t].join();
        sum += rates[t];
    }
    return sum;
}

int main(int, char** arguments) {
    const int num_threads = std::atoi(arguments[1]);
    const double seconds = std::atof(arguments[2]);
    const std::size_t part = kReadBytes / num_threads / kBytes * kBytes;
    std::vector<Vector*> values;
    for (int t = 0; t < num_threads; ++t) values.push_back(allocate(part));
    do {
        const double flops = rate(num_threads, seconds, [](int) { return multiply_adds(); });
        const double bytes = rate(num_threads, seconds, [&](int t) { return read(values[t], part / kBytes); });
        std::printf("%.6g %.6g\n", flops, bytes);
        std::fflush(stdout);
    } while (std::getchar() != EOF);
}

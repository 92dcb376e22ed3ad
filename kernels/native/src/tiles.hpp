// Tiles of matrix products: a few rows times a few panels, with their sums in registers.
//
// An output is the sum over its inputs in a fixed order, in one accumulator, whatever else is computed. A row's result
// therefore depends neither on the number of rows nor on how they are divided into tiles.
#pragma once

#include "packed.hpp"

namespace warren {

template <int kRows, int kPanels>
using Sums = Floats[kRows][kPanels][kVectors];

struct Float32Panels {
    static constexpr int32_t kFormat = kFloat32;
    static constexpr bool kOddFirst = false;  // whether the odd input of a pair is added first

    template <bool is_odd>
    static void read(const uint8_t* panel, int pair, Floats (&to)[kVectors]) {
        const auto* at = reinterpret_cast<const float*>(panel) + (2 * pair + is_odd) * kPanel;
        for (int v = 0; v < kVectors; v++) to[v] = load(at + v * kLanes);
    }
};

struct Float16Panels {
    static constexpr int32_t kFormat = kFloat16;
    static constexpr bool kOddFirst = false;

    template <bool is_odd>
    static void read(const uint8_t* panel, int pair, Floats (&to)[kVectors]) {
        const auto* at = reinterpret_cast<const uint32_t*>(panel) + pair * kPanel;
        for (int v = 0; v < kVectors; v++) to[v] = half_of_words(load<Words>(at + v * kLanes), is_odd);
    }
};

// In the order of the instruction for bfloat16 products, so that the sums are equal to those of `dot_tile`.
struct Bfloat16Panels {
    static constexpr int32_t kFormat = kBfloat16;
    static constexpr bool kOddFirst = true;

    template <bool is_odd>
    static void read(const uint8_t* panel, int pair, Floats (&to)[kVectors]) {
        const auto* at = reinterpret_cast<const uint32_t*>(panel) + pair * kPanel;
        for (int v = 0; v < kVectors; v++) {
            const Words words = load<Words>(at + v * kLanes);
            to[v] = is_odd ? high_bf16(words) : low_bf16(words);
        }
    }
};

// Adds the contribution of one input. One input of a pair is processed before the other is read, because both would not
// fit into the registers.
template <bool is_odd, class Panels, int kRows, int kPanels>
inline void add_input(const float* x, int64_t stride, const uint8_t* panels, int64_t bytes, int pair,
                      Sums<kRows, kPanels>& sums) {
    Floats weights[kPanels][kVectors];
    for (int p = 0; p < kPanels; p++) Panels::template read<is_odd>(panels + p * bytes, pair, weights[p]);
    for (int r = 0; r < kRows; r++) {
        const Floats input = broadcast(x[r * stride + 2 * pair + is_odd]);
        for (int p = 0; p < kPanels; p++)
            for (int v = 0; v < kVectors; v++) sums[r][p][v] = multiply_add(input, weights[p][v], sums[r][p][v]);
    }
}

// Meanwhile the following panels are prefetched, because they come from memory; the processor reads those of a single row
// ahead by itself. Not unrolled: the compiler would need more values than there are registers, and the loop would take half
// as long again.
template <class Panels, int kRows, int kPanels>
inline void tile(const float* x, int64_t stride, const uint8_t* panels, int inputs, Sums<kRows, kPanels>& sums) {
    const int64_t bytes = panel_bytes(Panels::kFormat, inputs), pair_bytes = panel_bytes(Panels::kFormat, 2);
    for (int pair = 0; pair < inputs / 2; pair++) {
        for (int p = 0; kRows > 1 && p < kPanels; p++)
            for (int64_t at = 0; at < pair_bytes; at += 64)
                __builtin_prefetch(panels + (kPanels + p) * bytes + pair * pair_bytes + at);
        add_input<Panels::kOddFirst, Panels>(x, stride, panels, bytes, pair, sums);
        add_input<!Panels::kOddFirst, Panels>(x, stride, panels, bytes, pair, sums);
    }
}

#ifdef __AVX512BF16__
constexpr bool kHasBf16Dot = true;
inline Floats dot_bf16(Floats sums, Words a, Words b) {
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b));
}
#else
#ifdef WARREN_BF16_DOT  // emulates such a processor for tests on others
constexpr bool kHasBf16Dot = true;
#else
constexpr bool kHasBf16Dot = false;
#endif
inline Floats dot_bf16(Floats sums, Words a, Words b) {
    return multiply_add(low_bf16(a), low_bf16(b), multiply_add(high_bf16(a), high_bf16(b), sums));
}
#endif

// Whether products use the instruction. Intel's processors are faster without it, AMD's with it.
static bool uses_bf16_dot = kHasBf16Dot;  // not inline: libraries loaded together would share it

// Like `tile`, two inputs at a time, as bfloat16 numbers.
template <int kRows, int kPanels>
inline void dot_tile(const int16_t* x, int64_t stride, const uint8_t* panels, int inputs, Sums<kRows, kPanels>& sums) {
    const int64_t bytes = panel_bytes(kBfloat16, inputs);
#pragma GCC unroll 4
    for (int pair = 0; pair < inputs / 2; pair++) {
        Words weights[kPanels][kVectors];
        for (int p = 0; p < kPanels; p++)
            for (int v = 0; v < kVectors; v++)
                weights[p][v] = load<Words>(panels + p * bytes + (pair * kPanel + v * kLanes) * 4);
        for (int r = 0; r < kRows; r++) {
            uint32_t both;
            std::memcpy(&both, x + r * stride + 2 * pair, sizeof both);
            const Words input = both - Words{};
            for (int p = 0; p < kPanels; p++)
                for (int v = 0; v < kVectors; v++) sums[r][p][v] = dot_bf16(sums[r][p][v], weights[p][v], input);
        }
    }
}

}  // namespace warren

// Tiles of matrix products: a few rows times a few panels, with their sums in registers.
//
// An output is the sum over its inputs in a fixed order, in one accumulator, whatever else is computed. A row's result
// therefore depends neither on the number of rows nor on how they are divided into tiles.
#pragma once

#include <algorithm>

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

// Meanwhile the following panels are prefetched, because they come from memory. Not unrolled: the compiler would need
// more values than there are registers, and the loop would take half as long again.
template <class Panels, int kRows, int kPanels>
inline void tile(const float* x, int64_t stride, const uint8_t* panels, int inputs, Sums<kRows, kPanels>& sums) {
    const int64_t bytes = panel_bytes(Panels::kFormat, inputs), pair_bytes = panel_bytes(Panels::kFormat, 2);
    for (int pair = 0; pair < inputs / 2; pair++) {
        for (int p = 0; p < kPanels; p++)
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
inline void dot_tile(const int16_t* x, const uint8_t* panels, int inputs, Sums<kRows, kPanels>& sums) {
    const int64_t bytes = panel_bytes(kBfloat16, inputs);
#pragma GCC unroll 4
    for (int pair = 0; pair < inputs / 2; pair++) {
        Words weights[kPanels][kVectors];
        for (int p = 0; p < kPanels; p++)
            for (int v = 0; v < kVectors; v++)
                weights[p][v] = load<Words>(panels + p * bytes + (pair * kPanel + v * kLanes) * 4);
        for (int r = 0; r < kRows; r++) {
            uint32_t both;
            std::memcpy(&both, x + int64_t(r) * inputs + 2 * pair, sizeof both);
            const Words input = both - Words{};
            for (int p = 0; p < kPanels; p++)
                for (int v = 0; v < kVectors; v++) sums[r][p][v] = dot_bf16(sums[r][p][v], weights[p][v], input);
        }
    }
}

// Inputs as 16-bit integers with a scale for each block of 32: the relative step is 2^-15 of the block's maximum, finer
// than bfloat16's 2^-8, and sums of products with 8-bit and 4-bit codes are exact.
struct Codes {
    int16_t* codes;  // [rows, inputs]; bfloat16 numbers if the weights are
    float* scales;   // [rows, inputs / 32]
    float* totals;   // [rows, inputs / 32]: the scale times the sum of the codes
};

inline void encode_block(const float* x, int16_t* codes, float& scale, float& total) {
    float most = 0;
    for (int k = 0; k < kBlock; k++) most = std::max(most, std::abs(x[k]));
    scale = most / 32767.0f;
    const float inverse = most > 0 ? 32767.0f / most : 0;
    int32_t sum = 0;
    for (int k = 0; k < kBlock; k++) {
        codes[k] = static_cast<int16_t>(_mm_cvtss_si32(_mm_set_ss(x[k] * inverse)));
        sum += codes[k];
    }
    total = scale * sum;
}

// 16-bit products of adjacent lanes, added in pairs to 32-bit sums.
inline Ints add_products(Ints sums, Ints a, Ints b) {
#if WARREN_LANES == 8
    return sums + reinterpret_cast<Ints>(_mm256_madd_epi16((__m256i)a, (__m256i)b));
#elif defined(__AVX512VNNI__)
    return reinterpret_cast<Ints>(_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b));
#elif defined(__AVX512BW__)
    return sums + reinterpret_cast<Ints>(_mm512_madd_epi16((__m512i)a, (__m512i)b));
#else
    const auto *x = reinterpret_cast<const __m256i*>(&a), *y = reinterpret_cast<const __m256i*>(&b);
    __m256i both[2] = {_mm256_madd_epi16(x[0], y[0]), _mm256_madd_epi16(x[1], y[1])};
    return sums + load<Ints>(both);
#endif
}

// 2 * kLanes bytes, widened to 16 bits each.
template <bool is_signed>
inline Ints widen(const uint8_t* from) {
#if WARREN_LANES == 16 && defined(__AVX512BW__)
    const __m256i bytes = load<__m256i>(from);
    return reinterpret_cast<Ints>(is_signed ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes));
#else
    __m256i parts[kLanes / 8];
    for (int i = 0; i < kLanes / 8; i++) {
        const __m128i bytes = load<__m128i>(from + i * 16);
        parts[i] = is_signed ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes);
    }
    return load<Ints>(parts);
#endif
}

template <int kRows, int kPanels>
using Counts = Ints[kRows][kPanels][kVectors];

template <int kRows, int kPanels>
inline void add_pairs(const int16_t* x, int64_t stride, const Ints (&weights)[kPanels][kVectors],
                      Counts<kRows, kPanels>& counts) {
    for (int r = 0; r < kRows; r++) {
        int32_t pair;
        std::memcpy(&pair, x + r * stride, sizeof pair);
        const Ints input = pair - Ints{};
        for (int p = 0; p < kPanels; p++)
            for (int v = 0; v < kVectors; v++) counts[r][p][v] = add_products(counts[r][p][v], input, weights[p][v]);
    }
}

// Steps of a group of a block, for one vector of outputs: the codes of a step's pairs, as 16-bit numbers.
template <int32_t kFormat>
struct Pairs {
    static constexpr Layout kForm = layout(kFormat);

    Ints low, high;

    // The vector's outputs begin `output` outputs after those of the block.
    Pairs(const uint8_t* block, int step, int output) {
        const int pair = low_pair(kFormat, step), later = pair + pair_span(kFormat);
        constexpr int kAbove4 = kForm.bits & 4 ? 4 : 0, kAbove2 = kAbove4 + (kForm.bits & 2);
        const auto row = [&](int plane, int index) { return to_words(widen<false>(block + plane + index * kRow + output * 2)); };
        Words first{}, second{};
        if constexpr ((kForm.bits & 4) != 0) {
            const Words both = row(codes_at(kFormat), step);
            first = both & 0x000f000fu, second = (both >> 4) & 0x000f000fu;
        }
        if constexpr ((kForm.bits & 2) != 0) {
            const Words bits = row(plane2_at(kFormat), pair % 4);
            first |= ((bits >> pair / 4 * 2) & 0x00030003u) << kAbove4;
            second |= ((bits >> later / 4 * 2) & 0x00030003u) << kAbove4;
        }
        if constexpr ((kForm.bits & 1) != 0) {
            const Words bits = row(plane1_at(kFormat), pair % 2);
            first |= ((bits >> pair / 2) & 0x00010001u) << kAbove2;
            second |= ((bits >> later / 2) & 0x00010001u) << kAbove2;
        }
        low = value(first), high = value(second);
    }

   private:
    static Words to_words(Ints codes) { return reinterpret_cast<Words>(codes); }

    static Ints value(Words codes) {
        if constexpr (kForm.values != nullptr) return looked_up(kForm.values, codes);
        // Q4_0's offset is part of its minimum instead.
        if constexpr (kFormat != kQ4_0 && kForm.offset != 0) {
            using Shorts = int16_t __attribute__((vector_size(kLanes * 4), may_alias));
            return reinterpret_cast<Ints>(reinterpret_cast<Shorts>(codes) - int16_t{kForm.offset});
        }
        return reinterpret_cast<Ints>(codes);
    }
};

// The integer sums of one group of a block.
template <int32_t kFormat, int kRows, int kPanels>
inline void count_group(const int16_t* x, int64_t stride, const uint8_t* block, int64_t bytes, int group,
                        Counts<kRows, kPanels>& counts) {
    constexpr int kSteps = 8 / layout(kFormat).groups;
    if constexpr (layout(kFormat).bits == 8) {
#pragma GCC unroll 2
        for (int i = 0; i < 16; i++) {
            Ints weights[kPanels][kVectors];
            for (int p = 0; p < kPanels; p++)
                for (int v = 0; v < kVectors; v++)
                    weights[p][v] = widen<true>(block + p * bytes + i * kRow + v * kLanes * 2);
            add_pairs<kRows, kPanels>(x + 2 * i, stride, weights, counts);
        }
    } else {
#pragma GCC unroll 2
        for (int i = 0; i < kSteps; i++) {
            const int step = group * kSteps + i;
            Ints low[kPanels][kVectors], high[kPanels][kVectors];
            for (int p = 0; p < kPanels; p++)
                for (int v = 0; v < kVectors; v++) {
                    const Pairs<kFormat> pairs(block + p * bytes, step, v * kLanes);
                    low[p][v] = pairs.low, high[p][v] = pairs.high;
                }
            const int16_t* at = x + 2 * low_pair(kFormat, step);
            add_pairs<kRows, kPanels>(at, stride, low, counts);
            add_pairs<kRows, kPanels>(at + 2 * pair_span(kFormat), stride, high, counts);
        }
    }
}

// What codes are multiplied by, and what is added for each unit of the inputs' sum, for one vector of outputs.
template <int32_t kFormat>
struct GroupScales {
    Floats scale, least;

    GroupScales(const uint8_t* header, const uint8_t* block, int group, int output) {
        constexpr Layout kForm = layout(kFormat);
        if constexpr (kFormat == kMxfp4) {
            scale = exponent_scales(header + output);
        } else {
            scale = from_half(reinterpret_cast<const uint16_t*>(header) + output);
        }
        if constexpr (kForm.has_minima) least = from_half(reinterpret_cast<const uint16_t*>(header) + kPanel + output);
        if constexpr (kFormat == kQ4_0) least = scale * -8.0f;
        const uint8_t* own = block + group * kPanel + output;
        if constexpr (kForm.scales == kSigned) scale = scale * floats_of<true>(own);
        if constexpr (kForm.scales == kUnsigned) {
            scale = scale * floats_of<false>(own);
            least = -(least * floats_of<false>(own + minima_at(kFormat)));
        }
        if constexpr (kForm.scales == kNibbles) {
            const Ints both = ints_of<false>(own);
            scale = scale * __builtin_convertvector(both & 15, Floats);
            least = -(least * __builtin_convertvector(both >> 4, Floats));
        }
    }
};

// The scale of a block of inputs times the sum of a group's codes.
template <int32_t kFormat>
inline float group_total(const Codes& x, int64_t block, int64_t inputs_at, int group) {
    if constexpr (layout(kFormat).groups == 1) return x.totals[block];
    int32_t sum = 0;
    for (int k = 0; k < kBlock / 2; k++) sum += x.codes[inputs_at + group * kBlock / 2 + k];
    return x.scales[block] * static_cast<float>(sum);
}

template <int32_t kFormat, int kRows, int kPanels>
inline void quantized_tile(const Codes& x, const uint8_t* panels, int inputs, Sums<kRows, kPanels>& sums) {
    constexpr Layout kForm = layout(kFormat);
    constexpr bool kHasLeast = kForm.has_minima || kFormat == kQ4_0;
    const int64_t bytes = panel_bytes(kFormat, inputs);
    const int num_blocks = inputs / kBlock;
    for (int b = 0; b < num_blocks; b++) {
        const uint8_t* header = panels + b / kForm.blocks * headed_bytes(kFormat);
        const uint8_t* block = header + header_bytes(kFormat) + b % kForm.blocks * block_bytes(kFormat);
        for (int g = 0; g < kForm.groups; g++) {
            Counts<kRows, kPanels> counts = {};
            count_group<kFormat, kRows, kPanels>(x.codes + b * kBlock, inputs, block, bytes, g, counts);
            for (int p = 0; p < kPanels; p++)
                for (int v = 0; v < kVectors; v++) {
                    const GroupScales<kFormat> of(header + p * bytes, block + p * bytes, g, v * kLanes);
                    for (int r = 0; r < kRows; r++) {
                        Floats& sum = sums[r][p][v];
                        const int64_t at = int64_t(r) * num_blocks + b;
                        const Floats count = __builtin_convertvector(counts[r][p][v], Floats);
                        sum = multiply_add(count * x.scales[at], of.scale, sum);
                        if constexpr (kHasLeast) {
                            const float total = group_total<kFormat>(x, at, at * kBlock, g);
                            sum = multiply_add(broadcast(total), of.least, sum);
                        }
                    }
                }
        }
    }
}

}  // namespace warren

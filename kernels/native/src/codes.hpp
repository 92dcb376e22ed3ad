// Rows of activations as integers, for products with quantized weights.
//
// A block of 32 inputs shares a scale: its maximum is the greatest integer. Integers of 16 bits are finer than bfloat16
// numbers by a factor of 128. Integers of 8 bits are multiplied four at a time. Sums of products with codes of weights
// are exact in both cases, so that every processor computes the same bits.
#pragma once

#include <algorithm>
#include <limits>

#include "layouts.hpp"

namespace warren {

constexpr int kHalf = kBlock / 2;  // inputs of the groups of weights with two groups in a block

struct Codes {
    int16_t* codes;    // [rows, inputs] of 16 bits, bfloat16 if the weights are; or [rows, inputs] of 8 bits
    float* scales;     // [rows, inputs / 32]
    float* totals;     // [rows, inputs / 32]: the scale times the sum of the integers
    int32_t* sums;     // [rows, inputs / 16]: of the integers
    int32_t bits = 16;  // of an integer: 8 or 16

    // The same inputs in another row, for weights of this format.
    void copy_row(int64_t from, int64_t to, int64_t inputs, int32_t format) const {
        const auto copy = [&](void* all, size_t row_bytes) {
            auto* bytes = static_cast<uint8_t*>(all);
            std::memcpy(bytes + to * row_bytes, bytes + from * row_bytes, row_bytes);
        };
        const bool has_scales = is_quantized(format);
        copy(codes, inputs * (has_scales ? bits / 8 : 2));
        if (!has_scales) return;
        copy(scales, inputs / kBlock * 4), copy(totals, inputs / kBlock * 4), copy(sums, inputs / kHalf * 4);
    }
};

// The nearest integers; numbers that are too large, which are those of a block without a finite inverse of its scale, and
// NaN become 0.
inline Ints nearest(Floats values) {
    const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Ints found = reinterpret_cast<Ints>(values + magic) - reinterpret_cast<Ints>(magic);
    const Floats size = reinterpret_cast<Floats>(reinterpret_cast<Words>(values) & 0x7fffffffu);
    return size < 4194304.0f ? found : Ints{};
}

// Integers that fit into 16 or 8 bits.
inline void store_narrow(int16_t* to, Ints values) {
#if WARREN_LANES == 16 && defined(__AVX512F__)
    store(to, _mm512_cvtepi32_epi16((__m512i)values));
#else
    const auto* fours = reinterpret_cast<const __m128i*>(&values);
    for (int i = 0; i < kLanes / 8; i++) store(to + 8 * i, _mm_packs_epi32(fours[2 * i], fours[2 * i + 1]));
#endif
}
inline void store_narrow(int8_t* to, Ints values) {
#if WARREN_LANES == 16 && defined(__AVX512F__)
    store(to, _mm512_cvtepi32_epi8((__m512i)values));
#else
    int16_t shorts[kLanes];
    store_narrow(shorts, values);
    for (int i = 0; i < kLanes; i += 8) {
        const __m128i eight = load<__m128i>(shorts + i);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to + i), _mm_packs_epi16(eight, eight));
    }
#endif
}

// The sum. Each part is copied: GCC 12 loses additions to parts of a register that it reads through a pointer.
inline int32_t total_of(Ints values) {
    const auto* at = reinterpret_cast<const char*>(&values);
    __m128i sum = load<__m128i>(at);
    for (int i = 1; i < kLanes / 4; i++) sum = _mm_add_epi32(sum, load<__m128i>(at + 16 * i));
    sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
    return _mm_extract_epi32(sum, 0) + _mm_extract_epi32(sum, 1);
}

// Of four neighbours, the first and the third are a pair of factors, and the other two: see `Shorts`.
inline void pair_alternately(int16_t* codes) {
    for (int k = 0; k < kBlock; k += 4) std::swap(codes[k + 1], codes[k + 2]);
}

template <class Code>
inline void encode_block(const float* x, Code* codes, float& scale, float& total, int32_t* sums) {
    constexpr float kMost = std::numeric_limits<Code>::max();
    Floats most{};
    for (int k = 0; k < kBlock; k += kLanes) {
        const Floats value = load(x + k);
        most = maximum(reinterpret_cast<Floats>(reinterpret_cast<Words>(value) & 0x7fffffffu), most);
    }
    const float limit = largest(most);
    scale = limit / kMost;
    const float inverse = limit > 0 ? kMost / limit : 0;
    for (int half = 0; half < 2; half++) {
        Ints sum{};
        for (int k = half * kHalf; k < (half + 1) * kHalf; k += kLanes) {
            const Ints found = nearest(load(x + k) * inverse);
            store_narrow(codes + k, found);
            sum += found;
        }
        sums[half] = total_of(sum);
    }
    total = scale * static_cast<float>(sums[0] + sums[1]);
}

// One row of floats.
inline void encode(const float* x, int64_t row, int inputs, const Codes& to) {
    for (int k = 0; k < inputs; k += kBlock) {
        const int64_t at = row * inputs + k;
        float &scale = to.scales[at / kBlock], &total = to.totals[at / kBlock];
        int32_t* sums = to.sums + at / kHalf;
        if (to.bits == 8) {
            encode_block(x + k, reinterpret_cast<int8_t*>(to.codes) + at, scale, total, sums);
        } else {
            encode_block(x + k, to.codes + at, scale, total, sums);
            pair_alternately(to.codes + at);
        }
    }
}

}  // namespace warren

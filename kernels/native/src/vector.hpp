// A vector of floats and its operations. The width is the machine's: 8 with AVX2, 16 with AVX-512. WARREN_LANES=16 on a
// machine with only AVX2 runs the wide code as two halves, so that it can be tested anywhere.
//
// Every width gives the same bits: a reduction always adds partial sums of kPanel numbers in the same order, a product
// and a sum are one operation only where `multiply_add` says so (-ffp-contract=off), and denormal numbers are zero
// (`FlushDenormals`), as they are to the bfloat16 instructions.
#pragma once

#include "intrinsics.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef WARREN_LANES
#ifdef __AVX512F__
#define WARREN_LANES 16
#else
#define WARREN_LANES 8
#endif
#endif

namespace warren {

constexpr int kLanes = WARREN_LANES;
constexpr int kPanel = 16;  // adjacent outputs in packed weights
constexpr int kVectors = kPanel / kLanes;

using Floats = float __attribute__((vector_size(kLanes * 4), may_alias));
using Words = uint32_t __attribute__((vector_size(kLanes * 4), may_alias));
using Ints = int32_t __attribute__((vector_size(kLanes * 4), may_alias));
using Floats4 = float __attribute__((vector_size(16), may_alias));
using Floats8 = float __attribute__((vector_size(32), may_alias));

template <class Vector>
inline Vector load(const void* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

template <class Vector>
inline void store(void* to, Vector vector) {
    std::memcpy(to, &vector, sizeof vector);
}

inline Floats load(const float* from) { return load<Floats>(from); }

inline Floats broadcast(float value) { return value - Floats{}; }

// a * b + c, rounded once.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if WARREN_LANES == 8
    return reinterpret_cast<Floats>(_mm256_fmadd_ps(a, b, c));
#elif defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_fmadd_ps(a, b, c));
#else
    Floats sum;
    for (int half = 0; half < 2; half++) {
        const auto* x = reinterpret_cast<const __m256*>(&a) + half;
        const auto* y = reinterpret_cast<const __m256*>(&b) + half;
        const auto* z = reinterpret_cast<const __m256*>(&c) + half;
        reinterpret_cast<__m256*>(&sum)[half] = _mm256_fmadd_ps(*x, *y, *z);
    }
    return sum;
#endif
}

// The maximum; the second operand if one is NaN.
inline Floats maximum(Floats a, Floats b) {
#if WARREN_LANES == 8
    return reinterpret_cast<Floats>(_mm256_max_ps(a, b));
#elif defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_max_ps(a, b));
#else
    return a > b ? a : b;
#endif
}

// The two bfloat16 numbers in each word, as floats.
inline Floats low_bf16(Words pairs) { return reinterpret_cast<Floats>(pairs << 16); }
inline Floats high_bf16(Words pairs) { return reinterpret_cast<Floats>(pairs & 0xffff0000u); }

inline float from_bf16(uint16_t value) {
    const uint32_t word = static_cast<uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &word, sizeof result);
    return result;
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((word >> 16) | 0x40u);
    return static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

// The same for each element, as floats.
inline Floats rounded_to_bf16(Floats value) {
    const Words word = reinterpret_cast<Words>(value);
    const Words nearest = word + 0x7fffu + ((word >> 16) & 1u);
    const Words rounded = (word & 0x7fffffffu) > 0x7f800000u ? word | 0x400000u : nearest;
    return high_bf16(rounded);
}

inline Floats from_bf16(const uint16_t* from) {
    using Halves = uint16_t __attribute__((vector_size(kLanes * 2), may_alias));
    const Words words = __builtin_convertvector(load<Halves>(from), Words);
    return reinterpret_cast<Floats>(words << 16);
}

// kLanes numbers of IEEE half precision.
inline Floats from_half(const uint16_t* from) {
#if WARREN_LANES == 16 && defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_cvtph_ps(load<__m256i>(from)));
#else
    Floats result;
    for (int i = 0; i < kLanes / 8; i++)
        reinterpret_cast<__m256*>(&result)[i] = _mm256_cvtph_ps(load<__m128i>(from + 8 * i));
    return result;
#endif
}

// A number in 8 bits: a sign, 4 bits of exponent and 3 of fraction, without infinities (Micikevicius et al.,
// arXiv:2209.05433, E4M3).
struct Float8 {
    uint8_t bits;
};

// The nearest number, at most 448 in size.
inline Float8 to_float8(float value) {
    const uint32_t word = load<uint32_t>(&value), size = word & 0x7fffffffu;
    const uint8_t sign = word >> 24 & 0x80;
    if (size > 0x7f800000u) return {uint8_t(sign | 0x7f)};
    if (size >= 0x43e00000u) return {uint8_t(sign | 0x7e)};
    if (size < 0x3c800000u) return {uint8_t(sign | uint8_t(std::lrintf(std::fabs(value) * 512)))};
    return {uint8_t(sign | uint8_t(((size + 0x7ffffu + (size >> 20 & 1)) >> 20) - (120 << 3)))};
}

inline float from_float8(Float8 number) {
    const uint16_t size = number.bits & 0x7f, sign = (number.bits & 0x80) << 8;
    return from_half(static_cast<uint16_t>(sign | (size == 0x7f ? 0x7fff : size << 7))) * 256;
}

// Eight numbers in lanes of 16 bits. With their bits at the bits of half precision they are too small by a factor of 256.
inline __m256 eight_of_float8(__m128i lanes) {
    const __m128i size = _mm_and_si128(lanes, _mm_set1_epi16(0x7f));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(lanes, _mm_set1_epi16(0x80)), 8);
    const __m128i nan = _mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f));
    const __m128i half = _mm_or_si128(_mm_slli_epi16(size, 7), _mm_and_si128(nan, _mm_set1_epi16(0x7fff)));
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, sign)), _mm256_set1_ps(256));
}

inline Floats from_float8(const Float8* from) {
    Floats result;
    for (int i = 0; i < kLanes; i += 8) {
        const __m256 eight = eight_of_float8(_mm_cvtepu8_epi16(_mm_cvtsi64_si128(load<int64_t>(from + i))));
        std::memcpy(reinterpret_cast<char*>(&result) + i * 4, &eight, sizeof eight);
    }
    return result;
}

// kPanel numbers over 256, none of which is NaN.
inline void read_float8(const uint8_t* from, Floats (&to)[kVectors]) {
    // The sign is copied into the place of the highest bit of the exponent, which is zero in such small numbers.
    const __m256i lanes = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load<__m128i>(from)), 7);
    const __m256i halves = _mm256_and_si256(lanes, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
#if WARREN_LANES == 16 && defined(__AVX512F__)
    to[0] = reinterpret_cast<Floats>(_mm512_cvtph_ps(halves));
#else
    const __m256 eights[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                              _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
    std::memcpy(to, eights, sizeof eights);
#endif
}

// The first or second half-precision number of each word.
inline Floats half_of_words(Words pairs, bool is_second) {
    using Halves = uint16_t __attribute__((vector_size(kLanes * 2), may_alias));
    const Halves halves = __builtin_convertvector(is_second ? pairs >> 16 : pairs & 0xffffu, Halves);
    return from_half(reinterpret_cast<const uint16_t*>(&halves));
}

// kLanes integers of 8 bits, signed or not. Compilers make such vectors element by element from a conversion.
template <bool is_signed>
inline Ints ints_of(const uint8_t* from) {
#if WARREN_LANES == 16 && defined(__AVX512F__)
    const __m128i bytes = load<__m128i>(from);
    return reinterpret_cast<Ints>(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#else
    Ints result;
    for (int i = 0; i < kLanes / 8; i++) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8 * i));
        reinterpret_cast<__m256i*>(&result)[i] = is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
    }
    return result;
#endif
}

template <bool is_signed>
inline Floats floats_of(const uint8_t* from) {
    return __builtin_convertvector(ints_of<is_signed>(from), Floats);
}

// 2 to the power of exponents, over 128 binary places: ggml's scales of MXFP4.
inline Floats exponent_scales(const uint8_t* from) {
    const Ints exponents = ints_of<false>(from);
    const Ints tiny = (Ints{} + 0x200000) << exponents;
    return reinterpret_cast<Floats>(exponents < 2 ? tiny : (exponents - 1) << 23);
}

// The values of the codes, below 16, in bytes.
inline Words looked_up(const uint8_t* values, Words codes) {
    const __m128i table = load<__m128i>(values);
    Words found;
#if WARREN_LANES == 16 && defined(__AVX512BW__)
    found = reinterpret_cast<Words>(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes));
#else
    for (int i = 0; i < kLanes / 8; i++)
        reinterpret_cast<__m256i*>(&found)[i] =
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), reinterpret_cast<const __m256i*>(&codes)[i]);
#endif
    return found;
}

// The same of 16 floats.
inline Floats looked_up(const float* values, Ints codes) {
#if WARREN_LANES == 16 && defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_permutexvar_ps((__m512i)codes, (__m512)load(values)));
#else
    const __m256 first = load<Floats8>(values), second = load<Floats8>(values + 8);
    Floats found;
    for (int i = 0; i < kLanes / 8; i++) {
        const __m256i own = reinterpret_cast<const __m256i*>(&codes)[i];
        reinterpret_cast<__m256*>(&found)[i] =
            _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, own), _mm256_permutevar8x32_ps(second, own),
                             _mm256_castsi256_ps(_mm256_slli_epi32(own, 28)));
    }
    return found;
#endif
}

// The sum of kPanel numbers, in a fixed order of additions.
inline float sum(const Floats (&values)[kVectors]) {
    const auto* at = reinterpret_cast<const char*>(values);
    const __m256 eight = load<Floats8>(at) + load<Floats8>(at + 32);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float largest(Floats value) {
#if WARREN_LANES == 8
    const __m256 eight = value;
#else
    const Floats8 low = load<Floats8>(&value), high = load<Floats8>(reinterpret_cast<char*>(&value) + 32);
    const __m256 eight = low > high ? low : high;
#endif
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// e to the power of each element, which must not exceed 88, within 2 units in the last place; e^-87 for elements below
// -87. Cody and Waite's reduction and the polynomial of Cephes' expf.
inline Floats exponential(Floats x) {
    x = maximum(broadcast(-87.0f), x);
    const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Floats shifted = multiply_add(x, broadcast(1.44269504088896341f), magic);
    const Floats power = shifted - magic;
    Floats rest = multiply_add(power, broadcast(-0.693359375f), x);
    rest = multiply_add(power, broadcast(2.12194440e-4f), rest);
    Floats series = broadcast(1.9875691500e-4f);
    series = multiply_add(series, rest, broadcast(1.3981999507e-3f));
    series = multiply_add(series, rest, broadcast(8.3334519073e-3f));
    series = multiply_add(series, rest, broadcast(4.1665795894e-2f));
    series = multiply_add(series, rest, broadcast(1.6666665459e-1f));
    series = multiply_add(series, rest, broadcast(5.0000001201e-1f));
    series = multiply_add(series, rest * rest, rest) + 1.0f;
    const Ints exponent = reinterpret_cast<Ints>(shifted) << 23;
    return reinterpret_cast<Floats>(reinterpret_cast<Ints>(series) + exponent);
}

// The hyperbolic tangent, within 3 units in the last place; NaN stays NaN.
inline Floats hyperbolic_tangent(Floats x) {
    const Words bits = reinterpret_cast<Words>(x);
    const Floats size = reinterpret_cast<Floats>(bits & 0x7fffffffu);
    const Floats power = exponential(-maximum(broadcast(-20.0f), -2.0f * size));
    const Floats wide = reinterpret_cast<Floats>(reinterpret_cast<Words>(1.0f - 2.0f / (power + 1.0f)) | (bits & 0x80000000u));
    // Near zero the difference would cancel: the Taylor series.
    const Floats square = x * x;
    Floats series = broadcast(0.021869488f);
    series = multiply_add(series, square, broadcast(-0.053968254f));
    series = multiply_add(series, square, broadcast(0.133333333f));
    series = multiply_add(series, square, broadcast(-0.333333333f));
    const Floats narrow = multiply_add(series * square, x, x);
    return size < 0.25f ? narrow : wide;
}

// cap * tanh(x / cap).
inline Floats soft_capped(Floats x, float cap) { return hyperbolic_tangent(x / cap) * cap; }

// The error function, within 2e-7 (Abramowitz and Stegun, 7.1.26); NaN stays NaN.
inline Floats error_function(Floats x) {
    const Words bits = reinterpret_cast<Words>(x);
    const Floats size = reinterpret_cast<Floats>(bits & 0x7fffffffu);
    const Floats t = 1.0f / multiply_add(size, broadcast(0.3275911f), broadcast(1.0f));
    Floats series = broadcast(1.061405429f);
    series = multiply_add(series, t, broadcast(-1.453152027f));
    series = multiply_add(series, t, broadcast(1.421413741f));
    series = multiply_add(series, t, broadcast(-0.284496736f));
    series = multiply_add(series, t, broadcast(0.254829592f));
    const Floats value = 1.0f - series * t * exponential(maximum(broadcast(-87.0f), -size * size));
    return reinterpret_cast<Floats>(reinterpret_cast<Words>(value) | (bits & 0x80000000u));
}

// log(1 + e^x).
inline Floats softplus(Floats x) {
    const Floats power = exponential(-maximum(x, -x));
    // log(1 + p) = 2 artanh(p / (2 + p)), whose series converges fast: the square is at most 1/9.
    const Floats ratio = power / (power + 2.0f), square = ratio * ratio;
    Floats series = broadcast(1.0f / 17);
    for (float factor : {1.0f / 15, 1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f})
        series = multiply_add(series, square, broadcast(factor));
    return maximum(x, Floats{}) + 2.0f * ratio * series;
}

}  // namespace warren

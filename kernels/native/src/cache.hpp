// The paged KV cache (Kwon et al., arXiv:2309.06180), and the spans of tokens in which it is read.
#pragma once

#include <algorithm>

#include "vector.hpp"

namespace warren {

enum CacheType : int32_t { kCacheFloat32 = 0, kCacheBfloat16 = 1, kCacheFloat8 = 2 };

struct Cache {
    uint8_t* keys;  // [num_blocks, block_size, num_kv_heads, head_dim], like the values
    uint8_t* values;
    int32_t type;
    int32_t block_size;  // divides 32
    int32_t num_kv_heads;
    int32_t head_dim;  // a multiple of 16

    int64_t element_bytes() const { return type == kCacheFloat32 ? 4 : type == kCacheBfloat16 ? 2 : 1; }
    int64_t slot_bytes() const { return element_bytes() * num_kv_heads * head_dim; }
};

constexpr int kSpan = 32;
constexpr int kSpanVectors = kSpan / kLanes;
constexpr int kMaxHeadDim = 576;

inline Floats load_element(const float* from) { return load(from); }
inline Floats load_element(const uint16_t* from) { return from_bf16(from); }
inline Floats load_element(const Float8* from) { return from_float8(from); }
// Four elements of each of two rows.
inline __m256 load_fours(const float* low, const float* high) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}
inline __m256 load_fours(const uint16_t* low, const uint16_t* high) {
    const __m128i both = _mm_set_epi64x(load<int64_t>(high), load<int64_t>(low));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(both), 16));
}
inline __m256 load_fours(const Float8* low, const Float8* high) {
    const __m128i both = _mm_set_epi32(0, 0, load<int32_t>(high), load<int32_t>(low));
    return eight_of_float8(_mm_cvtepu8_epi16(both));
}

// The location of the tokens begin .. begin + 31 for one key head; begin is a multiple of 32. Only begin + low .. begin
// + high - 1 may be read: other slots may contain NaN.
template <class Element>
struct Span {
    int begin, low = 0, high = 0;
    const Element* keys[kSpan];
    const Element* values[kSpan];

    // The part of the span within tokens first .. last - 1.
    void find(const Cache& cache, const int32_t* table, int kv_head, int from, int first, int last) {
        begin = from;
        low = std::max(first - begin, 0);
        high = std::min(last - begin, kSpan);
        const int64_t stride = int64_t(cache.num_kv_heads) * cache.head_dim;
        for (int i = low / cache.block_size * cache.block_size; i < high; i += cache.block_size) {
            const int64_t slot = int64_t(table[(begin + i) / cache.block_size]) * cache.block_size;
            const int64_t offset = slot * stride + kv_head * cache.head_dim;
            for (int j = 0; j < cache.block_size; j++) {
                keys[i + j] = reinterpret_cast<const Element*>(cache.keys) + offset + j * stride;
                values[i + j] = reinterpret_cast<const Element*>(cache.values) + offset + j * stride;
            }
        }
    }

    // Prefetches row i. Rows of other heads are in between, so hardware prefetchers do not recognize the pattern. Into
    // the second-level cache: the first has too few buffers for what is under way, and decoding takes twice as long.
    void prefetch(const Element* const (&rows)[kSpan], int i, int head_dim) const {
        constexpr int kSecondLevel = 2;
        if (i < low || i >= high) return;
        for (int d = 0; d < head_dim; d += 64 / int(sizeof(Element))) __builtin_prefetch(rows[i] + d, 0, kSecondLevel);
    }
};

// Loads a span's keys as floats, [head_dim, kSpan], with zeros for slots that may not be read. Meanwhile the next span
// is prefetched row by row; prefetching all rows at once would exceed the available buffers.
template <class Element>
inline void transpose_keys(const Span<Element>& span, const Span<Element>& next, int head_dim, float* to) {
    alignas(64) static constexpr Element kNothing[kMaxHeadDim] = {};
    for (int i = 0; i < kSpan; i += 8) {
        const Element* rows[8];
        for (int j = 0; j < 8; j++) {
            rows[j] = i + j >= span.low && i + j < span.high ? span.keys[i + j] : kNothing;
            next.prefetch(next.keys, i + j, head_dim);
        }
        for (int d = 0; d < head_dim; d += 4) {
            __m256 fours[4];
            for (int j = 0; j < 4; j++) fours[j] = load_fours(rows[j] + d, rows[j + 4] + d);
            const __m256 low[2] = {_mm256_unpacklo_ps(fours[0], fours[1]), _mm256_unpacklo_ps(fours[2], fours[3])};
            const __m256 high[2] = {_mm256_unpackhi_ps(fours[0], fours[1]), _mm256_unpackhi_ps(fours[2], fours[3])};
            float* at = to + d * kSpan + i;
            _mm256_store_ps(at, _mm256_shuffle_ps(low[0], low[1], 0x44));
            _mm256_store_ps(at + kSpan, _mm256_shuffle_ps(low[0], low[1], 0xee));
            _mm256_store_ps(at + 2 * kSpan, _mm256_shuffle_ps(high[0], high[1], 0x44));
            _mm256_store_ps(at + 3 * kSpan, _mm256_shuffle_ps(high[0], high[1], 0xee));
        }
    }
}

// Loads a span's values as floats, [kSpan, head_dim].
template <class Element>
inline void unpack_values(const Span<Element>& span, const Span<Element>& next, int head_dim, float* to) {
    for (int i = span.low; i < span.high; i++) {
        next.prefetch(next.values, i, head_dim);
        for (int d = 0; d < head_dim; d += kLanes) store(to + i * head_dim + d, load_element(span.values[i] + d));
    }
}

}  // namespace warren

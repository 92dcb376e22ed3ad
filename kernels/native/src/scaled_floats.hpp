// Floats of 8 and 4 bits, of which a group of inputs shares a scale. See layouts.hpp.
#pragma once

#include "layouts.hpp"

namespace warren {

// The floats of bitsandbytes (create_normal_map and get_4bit_type in functional.py).
alignas(64) constexpr float kNf4Values[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
    -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
alignas(64) constexpr float kFp4Values[16] = {
    0.0f, 0.0625f / 12, 8.0f / 12, 1.0f, 4.0f / 12, 6.0f / 12, 2.0f / 12, 3.0f / 12,
    -0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -6.0f / 12, -2.0f / 12, -3.0f / 12};

constexpr const float* values_of(int32_t format) { return format == kNf4 ? kNf4Values : kFp4Values; }

// Bytes k of 16 rows become row k.
inline void transpose_bytes(__m128i (&rows)[kPanel]) {
    for (int round = 0; round < 4; round++) {
        __m128i next[kPanel];
        for (int i = 0; i < kPanel / 2; i++) {
            next[2 * i] = _mm_unpacklo_epi8(rows[i], rows[i + kPanel / 2]);
            next[2 * i + 1] = _mm_unpackhi_epi8(rows[i], rows[i + kPanel / 2]);
        }
        std::memcpy(rows, next, sizeof next);
    }
}

// Packs up to 16 rows. A group of a row is its scale, then its codes.
inline void pack_groups(int32_t format, const uint8_t* rows, int num_rows, int inputs, uint8_t* panel) {
    const int num_groups = inputs / group_inputs(format), codes = group_codes(format), stored = 4 + codes;
    for (int g = 0; g < num_groups; g++, panel += group_bytes(format)) {
        const auto group = [&](int row) { return rows + (int64_t(row) * num_groups + g) * stored; };
        std::memset(panel, 0, 4 * kPanel);
        for (int row = 0; row < num_rows; row++) std::memcpy(panel + 4 * row, group(row), 4);
        for (int first = 0; first < codes; first += kPanel) {
            __m128i bytes[kPanel] = {};
            for (int row = 0; row < num_rows; row++) bytes[row] = load<__m128i>(group(row) + 4 + first);
            transpose_bytes(bytes);
            std::memcpy(panel + kPanel * (4 + first), bytes, sizeof bytes);
        }
    }
}

// The weights of one output.
inline void unpack_groups(int32_t format, const uint8_t* panel, int output, int inputs, float* to) {
    for (int k = 0; k < inputs; k += group_inputs(format), panel += group_bytes(format)) {
        const float scale = load<float>(panel + 4 * output);
        const uint8_t* codes = panel + 4 * kPanel + output;
        for (int i = 0; i < group_inputs(format); i++) {
            const int code = codes[(format == kFloat8 ? i : i / 2) * kPanel];
            const float value = format == kFloat8 ? from_float8({static_cast<uint8_t>(code)})
                                                  : values_of(format)[code >> (i % 2 ? 0 : 4) & 15];
            to[k + i] = value * scale;
        }
    }
}

}  // namespace warren

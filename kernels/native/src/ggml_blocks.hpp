// Reads ggml's blocks (ggml-quants.c, dequantize_row_*): the scales, minima and codes of one output.
#pragma once

#include <type_traits>

#include "layouts.hpp"

namespace warren {

// As many blocks as share a header.
struct GgmlBlocks {
    uint16_t scale = 0, minimum = 0;  // half; the exponent of MXFP4
    uint8_t scales[2 * kMaxHeaderBlocks], minima[2 * kMaxHeaderBlocks];  // of each group
    uint8_t codes[kMaxHeaderBlocks * kBlock];
};

inline float half(uint16_t bits) { return from_half(bits); }

// ggml's scale of MXFP4, whose values are doubled.
inline float exponent_scale(uint8_t exponent) {
    const uint32_t word = exponent < 2 ? 0x200000u << exponent : uint32_t(exponent - 1) << 23;
    float scale;
    std::memcpy(&scale, &word, sizeof scale);
    return scale;
}

constexpr uint64_t kOnes = 0x0101010101010101;  // in each byte

// In each of 8 bytes: the bits of `mask`, from bit `shift` on.
inline uint64_t bits_of(const uint8_t* from, int shift, uint64_t mask) {
    uint64_t word;
    std::memcpy(&word, from, sizeof word);
    return word >> shift & mask * kOnes;
}

inline void add(uint64_t word, uint8_t* to) {
    word |= bits_of(to, 0, 255);
    std::memcpy(to, &word, sizeof word);
}

// Codes of 4 bits: `width` inputs in the low halves of as many bytes, the next ones in the high halves.
inline void read_nibbles(const uint8_t* from, int width, int count, uint8_t* codes) {
    for (int k = 0; k < count; k += 2 * width, from += width)
        for (int i = 0; i < width; i += 8) {
            const uint64_t low = bits_of(from + i, 0, 15), high = bits_of(from + i, 4, 15);
            std::memcpy(codes + k + i, &low, sizeof low);
            std::memcpy(codes + k + width + i, &high, sizeof high);
        }
}

// Adds bit k / 32 of byte k % 32 to each of 256 codes.
inline void add_bits(const uint8_t* from, int shift, uint8_t* codes) {
    for (int k = 0; k < 256; k += 8) add(bits_of(from + k % 32, k / 32, 1) << shift, codes + k);
}

// Adds the bits 2 (k / 32 % 4) and 2 (k / 32 % 4) + 1 of byte k / 128 * 32 + k % 32 to each of 256 codes.
inline void add_pairs(const uint8_t* from, int shift, uint8_t* codes) {
    for (int k = 0; k < 256; k += 8)
        add(bits_of(from + k / 128 * 32 + k % 32, k / 32 % 4 * 2, 3) << shift, codes + k);
}

// Adds bit k of 32 bits to each of 32 codes.
inline void add_row_of_bits(const uint8_t* from, int shift, uint8_t* codes) {
    for (int k = 0; k < 32; k += 8) {
        const uint64_t own = from[k / 8] * kOnes & 0x8040201008040201;  // in byte i bit i, or nothing
        add(((own + 0x7f * kOnes) >> 7 & kOnes) << shift, codes + k);
    }
}

// 8 scales and minima of 6 bits.
inline void read_scales(const uint8_t* from, GgmlBlocks& to) {
    for (int i = 0; i < 4; i++) {
        to.scales[i] = from[i] & 63;
        to.minima[i] = from[4 + i] & 63;
        to.scales[4 + i] = static_cast<uint8_t>((from[8 + i] & 15) | (from[i] >> 2 & 48));
        to.minima[4 + i] = static_cast<uint8_t>(from[8 + i] >> 4 | (from[4 + i] >> 2 & 48));
    }
}

template <int32_t kFormat>
inline void read_blocks(const uint8_t* from, GgmlBlocks& to) {
    const auto number = [&](int at) { return static_cast<uint16_t>(from[at] | from[at + 1] << 8); };
    if constexpr (kFormat == kQ8_0 || kFormat == kQ4_0 || kFormat == kIq4Nl) {
        to.scale = number(0);
        if constexpr (kFormat == kQ8_0)
            for (int k = 0; k < 32; k++) to.codes[k] = from[2 + k] ^ 0x80;
        else
            read_nibbles(from + 2, 16, 32, to.codes);
    } else if constexpr (kFormat == kQ4_1) {
        to.scale = number(0), to.minimum = number(2);
        read_nibbles(from + 4, 16, 32, to.codes);
    } else if constexpr (kFormat == kQ5_0 || kFormat == kQ5_1) {
        to.scale = number(0), to.minimum = number(2);  // the latter only in Q5_1
        const uint8_t* high = from + (kFormat == kQ5_0 ? 2 : 4);
        read_nibbles(high + 4, 16, 32, to.codes);
        add_row_of_bits(high, 4, to.codes);
    } else if constexpr (kFormat == kQ2K) {
        std::memcpy(to.scales, from, 16);
        std::memset(to.codes, 0, sizeof to.codes);
        add_pairs(from + 16, 0, to.codes);
        to.scale = number(80), to.minimum = number(82);
    } else if constexpr (kFormat == kQ3K) {
        std::memset(to.codes, 0, sizeof to.codes);
        add_pairs(from + 32, 0, to.codes);
        add_bits(from, 2, to.codes);
        const uint8_t* scales = from + 96;
        for (int i = 0; i < 16; i++) {
            const int low = scales[i % 8] >> i / 8 * 4 & 15, high = scales[8 + i % 4] >> i / 4 * 2 & 3;
            to.scales[i] = static_cast<uint8_t>((low | high << 4) - 32);
        }
        to.scale = number(108);
    } else if constexpr (kFormat == kQ4K || kFormat == kQ5K) {
        to.scale = number(0), to.minimum = number(2);
        read_scales(from + 4, to);
        read_nibbles(from + (kFormat == kQ4K ? 16 : 48), 32, 256, to.codes);
        if constexpr (kFormat == kQ5K) add_bits(from + 16, 4, to.codes);
    } else if constexpr (kFormat == kQ6K) {
        read_nibbles(from, 64, 256, to.codes);
        add_pairs(from + 128, 4, to.codes);
        std::memcpy(to.scales, from + 192, 16);
        to.scale = number(208);
    } else if constexpr (kFormat == kIq4Xs) {
        to.scale = number(0);
        for (int i = 0; i < 8; i++) {
            const int low = from[4 + i / 2] >> i % 2 * 4 & 15, high = number(2) >> 2 * i & 3;
            to.scales[i] = static_cast<uint8_t>((low | high << 4) - 32);
        }
        read_nibbles(from + 8, 16, 256, to.codes);
    } else {
        static_assert(kFormat == kMxfp4);
        to.scale = from[0];
        read_nibbles(from + 1, 16, 32, to.codes);
    }
}

// Calls `use` with a quantized format as a constant.
template <class Use>
inline void with_format(int32_t format, const Use& use) {
    switch (format) {
#define WARREN_FORMAT(name) \
    case name: return use(std::integral_constant<int32_t, name>{});
        WARREN_FORMAT(kQ8_0)
        WARREN_FORMAT(kQ4_0)
        WARREN_FORMAT(kQ4_1)
        WARREN_FORMAT(kQ5_0)
        WARREN_FORMAT(kQ5_1)
        WARREN_FORMAT(kQ2K)
        WARREN_FORMAT(kQ3K)
        WARREN_FORMAT(kQ4K)
        WARREN_FORMAT(kQ5K)
        WARREN_FORMAT(kQ6K)
        WARREN_FORMAT(kIq4Nl)
        WARREN_FORMAT(kIq4Xs)
        WARREN_FORMAT(kMxfp4)
#undef WARREN_FORMAT
    }
}

}  // namespace warren

// The layouts of packed weights: 16 outputs side by side, so that one vector holds the same inputs of neighbouring
// outputs. A panel is what 16 outputs need for all inputs, and panels follow one another.
//
//   float32            [inputs][16]
//   float16, bfloat16  [inputs / 2][16][2]
//   scaled floats      for each group of inputs: scales [16] float, then codes
//     of 8 bits        [inputs of a group][16]
//     of 4 bits        [inputs of a group / 2][16], with the first input of a pair in the high half
//   ggml's blocks      for each group of blocks that share a header: the header, then the blocks
//     header           scales [16] half (MXFP4: exponents [16]), then minima [16] half if the format has them
//     a block          of 32 inputs: further scales, further minima, codes
//
// Inputs 4 i to 4 i + 3 are quad i, and adjacent in memory for each output. Codes of 8 bits are 8 rows of 16 quads. Other
// codes are divided into planes of 4, 2 and 1 bits. The bytes of the plane of 4 bits hold a quad in their low halves, and
// the quad `quad_span` later in their high halves. The planes of 2 and 1 bits have 2 rows and 1 row of 16 quads; quad q is
// in row q % 2 of the plane of 2 bits.
#pragma once

#include "vector.hpp"

namespace warren {

enum Format : int32_t {
    kFloat32,
    kBfloat16,
    kFloat16,
    kFloat8,  // E4M3, see `Float8`; scaled floats
    kNf4,     // the 4-bit floats of bitsandbytes; scaled floats
    kFp4,
    kQ8_0,
    kQ4_0,
    kQ4_1,
    kQ5_0,
    kQ5_1,
    kQ2K,
    kQ3K,
    kQ4K,
    kQ5K,
    kQ6K,
    kIq4Nl,
    kIq4Xs,
    kMxfp4,
};

constexpr int kBlock = 32;  // inputs that share a scale of the activations
constexpr int kMaxHeaderBlocks = 8;

constexpr bool is_quantized(int32_t format) { return format >= kQ8_0; }
constexpr bool is_scaled(int32_t format) { return format >= kFloat8 && format <= kFp4; }

// Whether products round their inputs to bfloat16: they do where all weights are such numbers, but for scales.
constexpr bool has_bf16_inputs(int32_t format) { return format == kBfloat16 || format == kFloat8; }

// What multiplies the scale of a header, in each block.
enum Scales { kNone, kUnsigned, kSigned, kNibbles };  // kNibbles: the scale in the low half, the minimum in the high

struct Layout {
    int bits;
    int blocks = 1;           // that share a header
    Scales scales = kNone;
    bool has_minima = false;  // in the header; with kUnsigned also in each block
    int groups = 1;           // of a block, with scales of their own
    int offset = 0;           // subtracted from codes, or from values
    const uint8_t* values = nullptr;  // of codes
    int ggml_bytes = 0;       // of one output's blocks in a file
};

// Values of codes, plus 128.
constexpr uint8_t kIq4Values[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kMxfp4Values[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

constexpr Layout layout(int32_t format) {
    switch (format) {
        case kQ8_0: return {.bits = 8, .offset = 128, .ggml_bytes = 34};
        case kQ4_0: return {.bits = 4, .offset = 8, .ggml_bytes = 18};
        case kQ4_1: return {.bits = 4, .has_minima = true, .ggml_bytes = 20};
        case kQ5_0: return {.bits = 5, .offset = 16, .ggml_bytes = 22};
        case kQ5_1: return {.bits = 5, .has_minima = true, .ggml_bytes = 24};
        case kQ2K: return {.bits = 2, .blocks = 8, .scales = kNibbles, .has_minima = true, .groups = 2, .ggml_bytes = 84};
        case kQ3K: return {.bits = 3, .blocks = 8, .scales = kSigned, .groups = 2, .offset = 4, .ggml_bytes = 110};
        case kQ4K: return {.bits = 4, .blocks = 8, .scales = kUnsigned, .has_minima = true, .ggml_bytes = 144};
        case kQ5K: return {.bits = 5, .blocks = 8, .scales = kUnsigned, .has_minima = true, .ggml_bytes = 176};
        case kQ6K: return {.bits = 6, .blocks = 8, .scales = kSigned, .groups = 2, .offset = 32, .ggml_bytes = 210};
        case kIq4Nl: return {.bits = 4, .offset = 128, .values = kIq4Values, .ggml_bytes = 18};
        case kIq4Xs: return {.bits = 4, .blocks = 8, .scales = kSigned, .offset = 128, .values = kIq4Values, .ggml_bytes = 136};
        default: return {.bits = 4, .offset = 128, .values = kMxfp4Values, .ggml_bytes = 17};
    }
}

constexpr int kRow = 4 * kPanel;  // the bytes of one quad of all outputs

constexpr int scale_width(int32_t format) { return format == kMxfp4 ? 1 : 2; }
constexpr int header_bytes(int32_t format) {
    return kPanel * (scale_width(format) + (layout(format).has_minima ? 2 : 0));
}
constexpr int minima_at(int32_t format) {  // of a block, after its scales
    return kPanel * layout(format).groups;
}
constexpr int codes_at(int32_t format) {
    const Layout form = layout(format);
    return form.scales == kNone ? 0 : minima_at(format) * (form.scales == kUnsigned ? 2 : 1);
}
constexpr int plane2_at(int32_t format) { return codes_at(format) + (layout(format).bits & 4 ? 4 * kRow : 0); }
constexpr int plane1_at(int32_t format) { return plane2_at(format) + (layout(format).bits & 2 ? 2 * kRow : 0); }
constexpr int block_bytes(int32_t format) { return codes_at(format) + layout(format).bits * 4 * kPanel; }
constexpr int headed_bytes(int32_t format) {
    return header_bytes(format) + layout(format).blocks * block_bytes(format);
}

// A group of scaled floats: the inputs that share a scale, and the bytes of one output's codes.
constexpr int group_inputs(int32_t format) { return format == kFloat8 ? 128 : 64; }
constexpr int group_codes(int32_t format) { return format == kFloat8 ? 128 : 32; }
constexpr int group_bytes(int32_t format) { return kPanel * (4 + group_codes(format)); }

constexpr int64_t panel_bytes(int32_t format, int64_t inputs) {
    if (is_scaled(format)) return inputs / group_inputs(format) * group_bytes(format);
    if (!is_quantized(format)) return inputs * kPanel * (format == kFloat32 ? 4 : 2);
    return inputs / (kBlock * layout(format).blocks) * headed_bytes(format);
}

// The quads of step j of 4: the quad in the low halves, or in the first of two rows of 8 bits, and the distance to the
// other. A step stays within a group.
constexpr int quad_span(int32_t format) {
    const Layout form = layout(format);
    return form.bits == 8 ? 1 : form.groups == 2 ? 2 : 4;
}
constexpr int low_quad(int32_t format, int step) {
    const int span = quad_span(format);
    return step / span * 2 * span + step % span;
}

}  // namespace warren

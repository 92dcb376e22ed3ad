// Packed weights: 16 outputs side by side, so that one vector holds the same inputs of neighbouring outputs.
// A panel is what 16 outputs need for all inputs, and panels follow one another.
//
//   float32    [inputs][16]
//   bfloat16   [inputs / 2][16][2]
//   q8_0       for each block of 32 inputs: scales [16] half, codes [16 pairs][16][2] int8
//   q4_0, q4_1 for each block of 32 inputs: scales [16] half, q4_1: minima [16] half, codes [8 pairs][16][2]: the
//              low half of a byte belongs to pair i, the high half to pair i + 8
#pragma once

#include "vector.hpp"

namespace warren {

enum Format : int32_t { kFloat32 = 0, kBfloat16 = 1, kQ8_0 = 2, kQ4_0 = 3, kQ4_1 = 4 };

constexpr int kBlock = 32;  // inputs that share a scale; ggml's QK8_0, QK4_0 and QK4_1

struct Weight {
    const uint8_t* panels;
    const float* bias;  // may be null
    int32_t format;
    int32_t outputs;
    int32_t inputs;  // even; a multiple of 32 if quantized
};

constexpr int header_bytes(int32_t format) { return format == kQ4_1 ? 4 : 2; }  // of one output's block
constexpr int code_bytes(int32_t format) { return format == kQ8_0 ? 32 : 16; }
constexpr int64_t block_bytes(int32_t format) { return kPanel * (header_bytes(format) + code_bytes(format)); }

constexpr int64_t panel_bytes(int32_t format, int64_t inputs) {
    if (format <= kBfloat16) return inputs * kPanel * (format == kFloat32 ? 4 : 2);
    return inputs / kBlock * block_bytes(format);
}

// Rounds the inputs of a product to bfloat16 if its weights are. Every processor computes with such inputs, whether it
// has instructions for them or not.
inline void round_inputs(float* row, int width, int32_t format) {
    if (format != kBfloat16) return;
    int d = 0;
    for (; d + kLanes <= width; d += kLanes) store(row + d, rounded_to_bf16(load(row + d)));
    for (; d < width; d++) row[d] = from_bf16(to_bf16(row[d]));
}

// Packs up to 16 rows of a row-major matrix of floats, bfloat16 numbers or ggml's blocks; missing rows become zero.
inline void pack_panel(int32_t format, const uint8_t* rows, int num_rows, int inputs, uint8_t* panel) {
    std::memset(panel, 0, panel_bytes(format, inputs));
    for (int row = 0; row < num_rows; row++) {
        if (format == kFloat32) {
            for (int k = 0; k < inputs; k++, rows += 4) std::memcpy(panel + (k * kPanel + row) * 4, rows, 4);
        } else if (format == kBfloat16) {
            for (int k = 0; k < inputs; k += 2, rows += 4) std::memcpy(panel + (k / 2 * kPanel + row) * 4, rows, 4);
        } else {
            const int header = header_bytes(format);
            for (int b = 0; b < inputs / kBlock; b++, rows += header + code_bytes(format)) {
                uint8_t* block = panel + b * block_bytes(format);
                for (int i = 0; i < header; i += 2) std::memcpy(block + i * kPanel + row * 2, rows + i, 2);
                // In ggml's 4-bit blocks, too, input k shares its byte with input k + 16.
                for (int i = 0; i < code_bytes(format); i += 2)
                    std::memcpy(block + header * kPanel + (i / 2 * kPanel + row) * 2, rows + header + i, 2);
            }
        }
    }
}

inline float half(const uint8_t* at) { return _cvtsh_ss(static_cast<uint16_t>(at[0] | at[1] << 8)); }

// The 32 weights of one output in one block.
inline void unpack_block(int32_t format, const uint8_t* block, int output, float* to) {
    const float scale = half(block + output * 2);
    const float least = format == kQ4_1 ? half(block + kPanel * 2 + output * 2) : 0;
    const uint8_t* codes = block + header_bytes(format) * kPanel + output * 2;
    for (int k = 0; k < kBlock; k++) {
        if (format == kQ8_0) {
            to[k] = scale * static_cast<int8_t>(codes[k / 2 * 2 * kPanel + k % 2]);
        } else {
            const int byte = codes[k % 16 / 2 * 2 * kPanel + k % 2];
            const int code = k < 16 ? byte & 15 : byte >> 4;
            to[k] = format == kQ4_1 ? scale * code + least : scale * (code - 8);
        }
    }
}

// The weights of one output, such as a row of an embedding.
inline void unpack_row(const Weight& weight, int64_t row, float* to) {
    const uint8_t* panel = weight.panels + row / kPanel * panel_bytes(weight.format, weight.inputs);
    const int output = row % kPanel;
    if (weight.format == kFloat32) {
        for (int k = 0; k < weight.inputs; k++) to[k] = reinterpret_cast<const float*>(panel)[k * kPanel + output];
    } else if (weight.format == kBfloat16) {
        const auto* pairs = reinterpret_cast<const uint16_t*>(panel);
        for (int k = 0; k < weight.inputs; k++) to[k] = from_bf16(pairs[(k / 2 * kPanel + output) * 2 + k % 2]);
    } else {
        for (int b = 0; b < weight.inputs / kBlock; b++)
            unpack_block(weight.format, panel + b * block_bytes(weight.format), output, to + b * kBlock);
    }
}

}  // namespace warren

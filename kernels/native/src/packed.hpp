// Packs matrices into panels, and reads their rows again. See layouts.hpp.
#pragma once

#include <algorithm>
#include <vector>

#include "ggml_blocks.hpp"
#include "scaled_floats.hpp"

namespace warren {

struct Weight {
    const uint8_t* panels;
    const float* bias;  // may be null
    int32_t format;
    int32_t outputs;  // of all parts
    int32_t inputs;   // even; a multiple of the inputs that share a header or a scale
    int32_t num_panels = 0;        // of this part, if another one follows
    const Weight* next = nullptr;  // the outputs after these, whose format is another quantized one
    const int32_t* order = nullptr;  // [inputs]: the places in a row of what the columns are multiplied by; null: in order
};

// A row-major matrix of floats, scaled floats or ggml's blocks, and the memory for its panels.
struct Unpacked {
    const uint8_t* rows;
    int64_t row_bytes;
    uint8_t* panels;
    int32_t format;
    int32_t outputs;
    int32_t inputs;
};

// Rounds the inputs of a product to bfloat16 for some formats of its weights. Every processor computes with such inputs, whether it
// has instructions for them or not.
inline void round_inputs(float* row, int width, int32_t format) {
    if (!has_bf16_inputs(format)) return;
    int d = 0;
    for (; d + kLanes <= width; d += kLanes) store(row + d, rounded_to_bf16(load(row + d)));
    for (; d < width; d++) row[d] = from_bf16(to_bf16(row[d]));
}

// The bytes of a word, each `& mask`.
inline uint32_t each_byte(uint32_t word, uint32_t mask) { return word & mask * 0x01010101u; }

// Writes one output's blocks with a common header. A quad is a word, and a plane's row takes bits of several quads.
template <int32_t kFormat>
inline void pack_blocks(const GgmlBlocks& from, int output, uint8_t* to) {
    constexpr Layout kForm = layout(kFormat);
    std::memcpy(to + output * scale_width(kFormat), &from.scale, scale_width(kFormat));
    if (kForm.has_minima) std::memcpy(to + kPanel * 2 + output * 2, &from.minimum, 2);
    to += header_bytes(kFormat);
    for (int b = 0; b < kForm.blocks; b++, to += block_bytes(kFormat)) {
        for (int g = 0; kForm.scales != kNone && g < kForm.groups; g++) {
            const int group = b * kForm.groups + g;
            to[g * kPanel + output] = from.scales[group];
            if (kForm.scales == kUnsigned) to[minima_at(kFormat) + g * kPanel + output] = from.minima[group];
        }
        uint32_t quads[8];
        std::memcpy(quads, from.codes + b * kBlock, kBlock);
        const auto write = [&](int plane, int row, uint32_t word) {
            std::memcpy(to + plane + row * kRow + output * 4, &word, 4);
        };
        if (kForm.bits == 8) {
            for (int q = 0; q < 8; q++) write(codes_at(kFormat), q, quads[q]);
            continue;
        }
        constexpr int kAbove4 = kForm.bits & 4 ? 4 : 0, kAbove2 = kAbove4 + (kForm.bits & 2);
        for (int step = 0; kForm.bits & 4 && step < 4; step++) {
            const int quad = low_quad(kFormat, step);
            const uint32_t high = each_byte(quads[quad + quad_span(kFormat)], 15);
            write(codes_at(kFormat), step, each_byte(quads[quad], 15) | high << 4);
        }
        for (int row = 0; kForm.bits & 2 && row < 2; row++) {
            uint32_t word = 0;
            for (int i = 0; i < 4; i++) word |= each_byte(quads[2 * i + row] >> kAbove4, 3) << 2 * i;
            write(plane2_at(kFormat), row, word);
        }
        if (kForm.bits & 1) {
            uint32_t word = 0;
            for (int q = 0; q < 8; q++) word |= each_byte(quads[q] >> kAbove2, 1) << q;
            write(plane1_at(kFormat), 0, word);
        }
    }
}

// The same blocks again.
template <int32_t kFormat>
inline void unpack_blocks(const uint8_t* from, int output, GgmlBlocks& to) {
    constexpr Layout kForm = layout(kFormat);
    std::memcpy(&to.scale, from + output * scale_width(kFormat), scale_width(kFormat));
    if (kForm.has_minima) std::memcpy(&to.minimum, from + kPanel * 2 + output * 2, 2);
    from += header_bytes(kFormat);
    for (int b = 0; b < kForm.blocks; b++, from += block_bytes(kFormat)) {
        for (int g = 0; kForm.scales != kNone && g < kForm.groups; g++) {
            const int group = b * kForm.groups + g;
            to.scales[group] = from[g * kPanel + output];
            if (kForm.scales == kUnsigned) to.minima[group] = from[minima_at(kFormat) + g * kPanel + output];
        }
        uint8_t* codes = to.codes + b * kBlock;
        const uint8_t *plane4 = from + codes_at(kFormat) + output * 4, *plane2 = from + plane2_at(kFormat) + output * 4,
                      *plane1 = from + plane1_at(kFormat) + output * 4;
        if (kForm.bits == 8) {
            for (int q = 0; q < 8; q++) std::memcpy(codes + 4 * q, plane4 + q * kRow, 4);
            continue;
        }
        constexpr int kAbove4 = kForm.bits & 4 ? 4 : 0, kAbove2 = kAbove4 + (kForm.bits & 2);
        for (int step = 0; step < 4; step++)
            for (int half = 0; half < 2; half++) {
                const int quad = low_quad(kFormat, step) + half * quad_span(kFormat);
                for (int s = 0; s < 4; s++) {
                    int code = 0;
                    if (kForm.bits & 4) code = plane4[step * kRow + s] >> 4 * half & 15;
                    if (kForm.bits & 2) code |= (plane2[quad % 2 * kRow + s] >> quad / 2 * 2 & 3) << kAbove4;
                    if (kForm.bits & 1) code |= (plane1[s] >> quad & 1) << kAbove2;
                    codes[4 * quad + s] = static_cast<uint8_t>(code);
                }
            }
    }
}

// The weights of one output's blocks with a common header, with the arithmetic of ggml.
template <int32_t kFormat>
inline void dequantize(const GgmlBlocks& blocks, float* to) {
    constexpr Layout kForm = layout(kFormat);
    constexpr int kGroupInputs = kBlock / kForm.groups;
    const float scale = kFormat == kMxfp4 ? exponent_scale(static_cast<uint8_t>(blocks.scale)) : half(blocks.scale);
    const float minimum = kForm.has_minima ? half(blocks.minimum) : 0;
    for (int k = 0; k < kForm.blocks * kBlock; k++) {
        const int group = k / kGroupInputs;
        float own = scale, least = minimum;
        if (kForm.scales == kSigned) own = scale * static_cast<int8_t>(blocks.scales[group]);
        if (kForm.scales == kUnsigned) own = scale * blocks.scales[group], least = -(minimum * blocks.minima[group]);
        if (kForm.scales == kNibbles) own = scale * (blocks.scales[group] & 15), least = -(minimum * (blocks.scales[group] >> 4));
        const int code = (kForm.values == nullptr ? blocks.codes[k] : kForm.values[blocks.codes[k]]) - kForm.offset;
        to[k] = kForm.has_minima ? own * code + least : own * code;
    }
}

// Packs words of 4 bytes, `num_words` of each row. Rows are read in pieces of a cache line, and a piece of all rows is
// written before the next one, so that no line of the panel is written in several passes.
inline void pack_words(const uint8_t* rows, int num_rows, int num_words, uint8_t* panel) {
    constexpr int kPiece = 16;
    for (int first = 0; first < num_words; first += kPiece)
        for (int row = 0; row < num_rows; row++) {
            const uint8_t* from = rows + int64_t(row) * num_words * 4;
            for (int k = first; k < std::min(first + kPiece, num_words); k++)
                std::memcpy(panel + (int64_t(k) * kPanel + row) * 4, from + int64_t(k) * 4, 4);
        }
}

// Packs up to 16 rows of a row-major matrix; missing rows become zero.
inline void pack_panel(int32_t format, const uint8_t* rows, int num_rows, int inputs, uint8_t* panel) {
    if (is_scaled(format)) return pack_groups(format, rows, num_rows, inputs, panel);
    if (num_rows < kPanel) std::memset(panel, 0, panel_bytes(format, inputs));
    if (!is_quantized(format)) return pack_words(rows, num_rows, format == kFloat32 ? inputs : inputs / 2, panel);
    with_format(format, [&](auto kind) {
        constexpr Layout form = layout(kind);
        const int count = inputs / (form.blocks * kBlock);
        for (int index = 0; index < count; index++, panel += headed_bytes(kind))
            for (int row = 0; row < num_rows; row++) {
                GgmlBlocks blocks;
                read_blocks<kind>(rows + (int64_t(row) * count + index) * form.ggml_bytes, blocks);
                pack_blocks<kind>(blocks, row, panel);
            }
    });
}

// Whether no scale or minimum in the headers of a panel makes its weights infinite or NaN.
inline bool has_finite_headers(int32_t format, const uint8_t* panel, int inputs) {
    constexpr int kGreatestExponent = 252, kOnesOfHalf = 0x7c00;
    bool is_finite = true;
    if (!is_quantized(format)) return is_finite;
    with_format(format, [&](auto kind) {
        for (int k = 0; k < inputs; k += layout(kind).blocks * kBlock, panel += headed_bytes(kind))
            for (int at = 0; at < header_bytes(kind); at += scale_width(kind)) {
                const int low = panel[at];
                if constexpr (kind == kMxfp4)
                    is_finite &= low <= kGreatestExponent;
                else
                    is_finite &= ((low | panel[at + 1] << 8) & kOnesOfHalf) != kOnesOfHalf;
            }
    });
    return is_finite;
}

// The weights of one output, such as a row of an embedding.
inline void unpack_row(const Weight& weight, int64_t row, float* to) {
    if (weight.order != nullptr) {
        Weight plain = weight;
        plain.order = nullptr;
        std::vector<float> columns(weight.inputs);
        unpack_row(plain, row, columns.data());
        for (int k = 0; k < weight.inputs; k++) to[weight.order[k]] = columns[k];
        return;
    }
    int64_t first = 0;
    const Weight* part = &weight;
    for (; part->next != nullptr && row / kPanel >= first + part->num_panels; part = part->next) first += part->num_panels;
    const uint8_t* panel = part->panels + (row / kPanel - first) * panel_bytes(part->format, part->inputs);
    const int output = row % kPanel;
    const auto* pairs = reinterpret_cast<const uint16_t*>(panel);
    const auto pair = [&](int k) { return pairs[(k / 2 * kPanel + output) * 2 + k % 2]; };
    if (is_scaled(part->format)) return unpack_groups(part->format, panel, output, weight.inputs, to);
    switch (part->format) {
        case kFloat32:
            for (int k = 0; k < weight.inputs; k++) to[k] = reinterpret_cast<const float*>(panel)[k * kPanel + output];
            return;
        case kBfloat16:
            for (int k = 0; k < weight.inputs; k++) to[k] = from_bf16(pair(k));
            return;
        case kFloat16:
            for (int k = 0; k < weight.inputs; k++) to[k] = half(pair(k));
            return;
    }
    with_format(part->format, [&](auto kind) {
        for (int k = 0; k < weight.inputs; k += layout(kind).blocks * kBlock, panel += headed_bytes(kind)) {
            GgmlBlocks blocks;
            unpack_blocks<kind>(panel, output, blocks);
            dequantize<kind>(blocks, to + k);
        }
    });
}

}  // namespace warren

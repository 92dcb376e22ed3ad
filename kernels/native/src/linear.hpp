// Matrix products with packed weights, divided into tasks for a team of threads.
#pragma once

#include "threads.hpp"
#include "tiles.hpp"

namespace warren {

struct Rows {
    const float* at;
    int64_t stride;  // floats from one row to the next
    int count;
};

struct Product {
    float* at;
    int64_t stride;
    bool is_added;  // added to the existing values: the residual connection
};

// The range of a task: rows first .. last - 1 times panels panel .. end - 1.
struct Task {
    int first, last, panel, end;
};

// The number of panels to process together for a number of rows: as many sums as fit into registers beside the weights.
// Eight rows of three panels need fewer loads than twelve of two, and fewer addresses of rows than there are registers.
constexpr int panels_for(int rows) {
    if (kLanes == 16) return rows == 1 ? 8 : rows == 2 ? 4 : 3;
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

// 16 outputs of one row, or fewer at its end.
inline void write(const Floats (&sums)[kVectors], const Weight& weight, int first, float* to, bool is_added) {
    const int count = weight.outputs - first;
    if (count >= kPanel) {
        for (int v = 0; v < kVectors; v++) {
            const int at = first + v * kLanes;
            const Floats value = weight.bias == nullptr ? sums[v] : sums[v] + load(weight.bias + at);
            store(to + at, is_added ? load(to + at) + value : value);
        }
        return;
    }
    float values[kPanel];
    for (int v = 0; v < kVectors; v++) store(values + v * kLanes, sums[v]);
    for (int n = 0; n < count; n++) {
        const float value = weight.bias == nullptr ? values[n] : values[n] + weight.bias[first + n];
        to[first + n] = is_added ? to[first + n] + value : value;
    }
}

// The operands of a task: `panels` starts with the task's first one, `out` is the destination of the product.
struct Operands {
    const Rows& x;
    const Codes& codes;  // the same rows, encoded, if the weight requires it
    const Weight& weight;
    const uint8_t* panels;
    const Product& out;
};

// The three implementations of a tile's sums, one for each layout of panels.
template <class Panels>
struct FloatTile {
    static constexpr int32_t kFormat = Panels::kFormat;
    static constexpr int kMaxRows = kLanes == 16 ? 8 : kFormat == kBfloat16 ? 5 : 6;

    template <int kRows, int kPanels>
    static void add(const Operands& o, int row, const uint8_t* panels, Sums<kRows, kPanels>& sums) {
        tile<Panels, kRows, kPanels>(o.x.at + row * o.x.stride, o.x.stride, panels, o.weight.inputs, sums);
    }
};

struct DotTile {
    static constexpr int32_t kFormat = kBfloat16;
    static constexpr int kMaxRows = kLanes == 16 ? 8 : 6;

    template <int kRows, int kPanels>
    static void add(const Operands& o, int row, const uint8_t* panels, Sums<kRows, kPanels>& sums) {
        dot_tile<kRows, kPanels>(o.codes.codes + int64_t(row) * o.weight.inputs, panels, o.weight.inputs, sums);
    }
};

template <int32_t kFormat_>
struct QuantizedTile {
    static constexpr int32_t kFormat = kFormat_;
    // It has integer sums beside the others. Rare formats have small tiles, because all of them have to be compiled.
    static constexpr bool kIsCommon = kFormat <= kQ4_1 || kFormat == kQ4K || kFormat == kQ5K || kFormat == kQ6K;
    static constexpr int kMaxRows = !kIsCommon ? 3 : kLanes == 16 ? 6 : 5;

    template <int kRows, int kPanels>
    static void add(const Operands& o, int row, const uint8_t* panels, Sums<kRows, kPanels>& sums) {
        const int64_t block = int64_t(row) * (o.weight.inputs / kBlock);
        const Codes codes{o.codes.codes + block * kBlock, o.codes.scales + block, o.codes.totals + block};
        quantized_tile<kFormat, kRows, kPanels>(codes, panels, o.weight.inputs, sums);
    }
};

template <class Tile, int kRows, int kPanels>
inline void write_tile(const Operands& o, int row, const uint8_t* panels, int panel) {
    Sums<kRows, kPanels> sums = {};
    Tile::template add<kRows, kPanels>(o, row, panels, sums);
    for (int r = 0; r < kRows; r++)
        for (int p = 0; p < kPanels; p++)
            write(sums[r][p], o.weight, (panel + p) * kPanel, o.out.at + (row + r) * o.out.stride, o.out.is_added);
}

template <class Tile, int kRows>
inline void panel_tiles(const Operands& o, int row, int panel, int end) {
    constexpr int kPanels = panels_for(kRows);
    const int64_t bytes = panel_bytes(Tile::kFormat, o.weight.inputs);
    const uint8_t* at = o.panels;
    for (; panel + kPanels <= end; panel += kPanels, at += kPanels * bytes)
        write_tile<Tile, kRows, kPanels>(o, row, at, panel);
    for (; panel < end; panel++, at += bytes) write_tile<Tile, kRows, 1>(o, row, at, panel);
}

template <class Tile, int kRows = Tile::kMaxRows>
inline void row_tiles(const Operands& o, int rows, int row, int panel, int end) {
    if (rows == kRows) return panel_tiles<Tile, kRows>(o, row, panel, end);
    if constexpr (kRows > 1) row_tiles<Tile, kRows - 1>(o, rows, row, panel, end);
}

// Tiles are as even as possible: a small one leaves registers, and so half of the core, unused.
template <class Tile>
inline void multiply(const Operands& o, const Task& task) {
    const int num_tiles = (task.last - task.first + Tile::kMaxRows - 1) / Tile::kMaxRows;
    for (int t = 0, row = task.first; t < num_tiles; t++) {
        const int rows = (task.last - row) / (num_tiles - t);
        row_tiles<Tile>(o, rows, row, task.panel, task.end);
        row += rows;
    }
}

inline void multiply_any(const Operands& o, int32_t format, const Task& task) {
    switch (format) {
        case kFloat32: return multiply<FloatTile<Float32Panels>>(o, task);
        case kBfloat16:
            if (uses_bf16_dot) return multiply<DotTile>(o, task);
            return multiply<FloatTile<Bfloat16Panels>>(o, task);
        case kFloat16: return multiply<FloatTile<Float16Panels>>(o, task);
        default:
            with_format(format, [&](auto kind) { multiply<QuantizedTile<kind>>(o, task); });
    }
}

// Converts one row for its weights' layout.
inline void encode_row(const Rows& x, int row, int32_t format, int inputs, const Codes& to) {
    const float* from = x.at + row * x.stride;
    int16_t* codes = to.codes + int64_t(row) * inputs;
    if (format == kBfloat16) {
        for (int k = 0; k < inputs; k++) codes[k] = static_cast<int16_t>(to_bf16(from[k]));
    } else {
        for (int k = 0; k < inputs; k += kBlock) {
            const int64_t block = (int64_t(row) * inputs + k) / kBlock;
            encode_block(from + k, codes + k, to.scales[block], to.totals[block]);
        }
    }
}

// Bytes of rows that stay in the L2 cache while panels are streamed.
constexpr int64_t kRowsBytes = 192 << 10;

// The division of a product into tasks.
struct Cut {
    int panels = 1;  // number of panels that stay together
    int twin = 0;    // distance to the panels that belong to a task's panels as well; 0: there are none
};

// Several tasks per thread, so that other threads take over when one is delayed by another process, of six panels or
// more, two of the widest tiles. The same number for each thread, if there are enough tasks.
inline int count_tasks(int num_panels, int num_units, int num_threads) {
    const int count = std::min(num_units, std::clamp(num_panels / 6, num_threads, 16 * num_threads));
    return count == num_units ? count : count / num_threads * num_threads;
}

// Whether products with the weight need their rows encoded.
inline bool is_encoded(const Weight& weight) {
    return is_quantized(weight.format) || (weight.format == kBfloat16 && uses_bf16_dot);
}

// A task of a product, whose panels may belong to several parts of the weight.
inline void multiply_parts(const Weight& weight, const Rows& x, const Codes& codes, const Product& out, const Task& task) {
    int first = 0;
    for (const Weight* part = &weight; part != nullptr; first += part->num_panels, part = part->next) {
        const int begin = std::max(task.panel, first);
        const int end = part->next == nullptr ? task.end : std::min(task.end, first + part->num_panels);
        if (begin >= end) continue;
        const uint8_t* panels = part->panels + (begin - first) * panel_bytes(part->format, weight.inputs);
        multiply_any({x, codes, weight, panels, out}, part->format, {task.first, task.last, begin, end});
    }
}

// out = x @ weight.T + bias, where x has been rounded for the weight (`round_inputs`), optionally added to the content
// of `out`; then `finish(task)` is called by the thread that has computed the task's outputs. Called by all threads of a
// team; each may pass its own copy of x. `codes` has room for the rows of x.
template <class Finish>
inline void linear(Team& team, const Rows& x, const Codes& codes, const Weight& weight, const Product& out,
                   const Cut& cut, const Finish& finish) {
    if (is_encoded(weight))
        team.share(x.count, [&](int row) { encode_row(x, row, weight.format, weight.inputs, codes); });
    constexpr int kTileRows = FloatTile<Float32Panels>::kMaxRows;
    const int rows_fit = std::max<int64_t>(1, kRowsBytes / (int64_t(weight.inputs) * 4 * kTileRows)) * kTileRows;
    const int num_blocks = (x.count + rows_fit - 1) / rows_fit;
    const int num_panels = cut.twin ? cut.twin : (weight.outputs + kPanel - 1) / kPanel;
    const int num_units = (num_panels + cut.panels - 1) / cut.panels;
    const int num_parts = count_tasks(num_panels, num_units, team.size());
    const auto compute = [&](const Task& task) { multiply_parts(weight, x, codes, out, task); };
    team.share(num_blocks * num_parts, [&](int index) {
        const int block = index / num_parts, part = index % num_parts;
        const Task task{x.count * block / num_blocks, x.count * (block + 1) / num_blocks,
                        num_units * part / num_parts * cut.panels,
                        std::min(num_panels, num_units * (part + 1) / num_parts * cut.panels)};
        compute(task);
        if (cut.twin) compute({task.first, task.last, task.panel + cut.twin, task.end + cut.twin});
        finish(task);
    });
}

// A product of each head's inputs with outputs of its own: those of head h begin at x.at + h * x_step and out.at + h *
// out_step. `weight` holds the heads' outputs one after another, a multiple of kPanel for each head. `codes` has room for
// the rows of all heads.
inline void linear_heads(Team& team, int num_heads, const Rows& x, int64_t x_step, const Codes& codes, const Weight& weight,
                         const Product& out, int64_t out_step) {
    constexpr int kTogether = 8;  // panels of a task
    const int size = weight.outputs / num_heads, num_panels = size / kPanel;
    const int num_parts = (num_panels + kTogether - 1) / kTogether;
    const auto head_rows = [&](int h) { return Rows{x.at + h * x_step, x.stride, x.count}; };
    const auto head_codes = [&](int h) {
        const int64_t at = int64_t(h) * x.count * weight.inputs;
        return Codes{codes.codes + at, codes.scales + at / kBlock, codes.totals + at / kBlock};
    };
    if (is_encoded(weight))
        team.share(num_heads * x.count, [&](int index) {
            const int h = index / x.count;
            encode_row(head_rows(h), index % x.count, weight.format, weight.inputs, head_codes(h));
        });
    team.share(num_heads * num_parts, [&](int index) {
        const int h = index / num_parts, part = index % num_parts;
        const Product to{out.at + h * (out_step - size), out.stride, out.is_added};  // of the head's outputs in all
        multiply_parts(weight, head_rows(h), head_codes(h), to,
                       {0, x.count, h * num_panels + num_panels * part / num_parts,
                        h * num_panels + num_panels * (part + 1) / num_parts});
    });
}

inline void linear(Team& team, const Rows& x, const Codes& codes, const Weight& weight, const Product& out) {
    linear(team, x, codes, weight, out, Cut{}, [](const Task&) {});
}

}  // namespace warren

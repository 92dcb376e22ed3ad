// Matrix products with packed weights, divided into tasks for a team of threads.
#pragma once

#include <limits>
#include <numeric>

#include "quantized.hpp"
#include "scaled.hpp"
#include "threads.hpp"

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
    if (kLanes == 16) return rows <= 2 ? 4 : 3;
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

constexpr int kQuantizedPanels = kLanes == 16 ? 3 : 1;  // of tiles with quantized weights: see quantized.hpp

inline int panels_for(int rows, int32_t format) { return is_quantized(format) ? kQuantizedPanels : panels_for(rows); }

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

// The implementations of a tile's sums for panels of floats.
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
        const int64_t inputs = o.weight.inputs;
        dot_tile<kRows, kPanels>(o.codes.codes + row * inputs, inputs, panels, inputs, sums);
    }
};

template <int kRows, int kPanels>
inline void write_sums(const Operands& o, int row, int panel, const Sums<kRows, kPanels>& sums) {
    for (int r = 0; r < kRows; r++)
        for (int p = 0; p < kPanels; p++)
            write(sums[r][p], o.weight, (panel + p) * kPanel, o.out.at + (row + r) * o.out.stride, o.out.is_added);
}

template <class Tile, int kRows, int kPanels>
inline void write_tile(const Operands& o, int row, const uint8_t* panels, int panel) {
    Sums<kRows, kPanels> sums = {};
    Tile::template add<kRows, kPanels>(o, row, panels, sums);
    write_sums(o, row, panel, sums);
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

// Whether it takes little time to make bytes of packed codes, so that nothing is gained by doing it once for many rows.
constexpr bool is_read_fast(int32_t format) {
    const Layout form = layout(format);
    return (form.bits == 8 || form.bits == 4) && form.groups == 1;
}

// The most rows whose tiles read codes as they are packed. Integers of 16 bits, which are slower in any case, have few
// tiles, because all of them have to be compiled for each format.
template <class Integers, int32_t kFormat>
constexpr int kMaxPackedRows = Integers::kBytes > 1 ? 2 : is_read_fast(kFormat) ? std::numeric_limits<int>::max() : 8;

// Tiles of up to kRows rows with as many panels as are left.
template <class Integers, int32_t kFormat, int kRows, int kPanels>
inline void packed_rows(const Operands& o, int row, int last, const uint8_t* panels, int panel) {
    const PackedPanels<kFormat> packed{panels, panel_bytes(kFormat, o.weight.inputs)};
    for (; row + kRows <= last; row += kRows) {
        Sums<kRows, kPanels> sums = {};
        const auto x = Encoded::of<Integers>(o.codes, row, o.weight.inputs);
        quantized_tile<Integers>(x, packed, 0, o.weight.inputs / kBlock, sums);
        write_sums(o, row, panel, sums);
    }
    if constexpr (kRows > 1)
        if (row < last) packed_rows<Integers, kFormat, kRows / 2, kPanels>(o, row, last, panels, panel);
}

// All panels of a task, of which a few at a time come from memory and stay in the L2 cache while all rows are multiplied.
// A single row is multiplied with one panel after the other, because memory is read fastest in order.
template <class Integers, int32_t kFormat>
inline void packed_panels(const Operands& o, const Task& task) {
    constexpr int kRows = Integers::kBytes > 1 ? 2 : 4, kPanels = kQuantizedPanels;
    const int64_t bytes = panel_bytes(kFormat, o.weight.inputs);
    const uint8_t* at = o.panels;
    int panel = task.panel;
    const auto next = [&](auto num_panels) {
        packed_rows<Integers, kFormat, kRows, num_panels>(o, task.first, task.last, at, panel);
        panel += num_panels, at += num_panels * bytes;
    };
    if (task.last - task.first > 1)
        while (panel + kPanels <= task.end) next(std::integral_constant<int, kPanels>{});
    while (panel < task.end) next(std::integral_constant<int, 1>{});
}

template <class Integers>
constexpr bool kMayUseTiles = kHasTiles && Integers::kBytes == 1;

// All rows of a task with one group of panels, expanded piece by piece. The sums are in memory between two pieces. The
// function is static, because libraries of a process would share the variables of an inline template.
template <class Integers, int32_t kFormat, int kPanels>
static void expanded_panels(const Operands& o, const Task& task, const uint8_t* panels, int panel) {
    constexpr int kRows = 4;  // six or eight are no faster, because their sums do not fit into the registers
    const int count = task.last - task.first, num_blocks = o.weight.inputs / kBlock;
    thread_local ExpandedFrom<kFormat> expanded;
    constexpr int kRowFloats = kPanels * kPanel;
    thread_local std::vector<float> all;
    all.assign(count * kRowFloats, 0.0f);
    const PackedPanels<kFormat> packed{panels, panel_bytes(kFormat, o.weight.inputs)};
    const auto x = [&](int row) { return Encoded::of<Integers>(o.codes, task.first + row, o.weight.inputs); };
    for (int first = 0; first < num_blocks; first += kExpandedBlocks) {
        const int blocks = std::min(kExpandedBlocks, num_blocks - first);
        expanded.expand(packed, kPanels, first, blocks, num_blocks);
        int row = 0;
        if constexpr (kMayUseTiles<Integers>)
            for (int left = uses_tiles ? (count + kRegisterRows - 1) / kRegisterRows : 0; left > 0; left--) {
                const int rows = (count - row) / left;
                register_tile<kPanels>(x(row), rows, expanded, first, blocks, &all[row * kRowFloats]);
                row += rows;
            }
        const auto tile = [&](auto rows) {
            Sums<rows, kPanels> sums;
            std::memcpy(&sums, &all[row * kRowFloats], sizeof sums);
            quantized_tile<Integers>(x(row), expanded, first, blocks, sums);
            std::memcpy(&all[row * kRowFloats], &sums, sizeof sums);
            row += rows;
        };
        while (row + kRows <= count) tile(std::integral_constant<int, kRows>{});
        if (row + 2 <= count) tile(std::integral_constant<int, 2>{});
        if (row < count) tile(std::integral_constant<int, 1>{});
    }
    for (int row = 0; row < count; row++) {
        Sums<1, kPanels> sums;
        std::memcpy(&sums, &all[row * kRowFloats], sizeof sums);
        write_sums(o, task.first + row, panel, sums);
    }
}

template <class Integers, int32_t kFormat>
inline void multiply_quantized(const Operands& o, const Task& task) {
    constexpr int kMostRows = kMaxPackedRows<Integers, kFormat>;
    const int count = task.last - task.first;
    const bool is_tiled = kMayUseTiles<Integers> && uses_tiles && count >= kRegisterRows;
    if (count <= kMostRows && !is_tiled) return packed_panels<Integers, kFormat>(o, task);
    if constexpr (kMostRows < std::numeric_limits<int>::max() || kMayUseTiles<Integers>) {
        constexpr int kPanels = kQuantizedPanels;
        const int64_t bytes = panel_bytes(kFormat, o.weight.inputs);
        int panel = task.panel;
        const auto at = [&] { return o.panels + (panel - task.panel) * bytes; };
        for (; panel + kPanels <= task.end; panel += kPanels) expanded_panels<Integers, kFormat, kPanels>(o, task, at(), panel);
        if constexpr (kPanels > 1)
            for (; panel < task.end; panel++) expanded_panels<Integers, kFormat, 1>(o, task, at(), panel);
    }
}

// The most rows whose tiles read scaled floats as they are packed.
constexpr int kMaxScaledRows = 4;

// As `packed_rows`. A single row has two panels, because its sums would wait for each other.
template <class Panels, int kRows = kMaxScaledRows>
inline void scaled_rows(const Operands& o, const Task& task, int row) {
    constexpr int kPanels = kRows == 1 ? 2 : 1;
    const int64_t bytes = panel_bytes(Panels::kFormat, o.weight.inputs);
    for (; row + kRows <= task.last; row += kRows) {
        const uint8_t* at = o.panels;
        const auto next = [&](auto num_panels, int panel) {
            Sums<kRows, num_panels> sums = {};
            scaled_tile<Panels>(o.x.at + row * o.x.stride, o.x.stride, at, o.weight.inputs, sums);
            write_sums(o, row, panel, sums);
            at += num_panels * bytes;
        };
        int panel = task.panel;
        for (; panel + kPanels <= task.end; panel += kPanels) next(std::integral_constant<int, kPanels>{}, panel);
        for (; panel < task.end; panel++) next(std::integral_constant<int, 1>{}, panel);
    }
    if constexpr (kRows > 1)
        if (row < task.last) scaled_rows<Panels, kRows / 2>(o, task, row);
}

// All rows of a task with a few panels, expanded group by group. The sums are in memory between two groups.
template <class Panels, int kPanels>
static void expanded_groups(const Operands& o, const Task& task, const uint8_t* panels, int panel) {
    const int count = task.last - task.first, inputs = o.weight.inputs;
    const int64_t bytes = panel_bytes(Panels::kFormat, inputs);
    constexpr int kRowFloats = kPanels * kPanel;
    thread_local ExpandedGroup<Panels, kPanels> group;
    thread_local std::vector<float> all;
    all.assign(count * kRowFloats, 0.0f);
    for (int first = 0; first < inputs; first += group.kInputs, panels += group_bytes(Panels::kFormat)) {
        group.expand(panels, bytes);
        int row = 0;
        const auto tile = [&](auto rows) {
            Sums<rows, kPanels> own = {}, sums;
            const int64_t at = task.first + row;
            group.template add<rows>(o.x.at + at * o.x.stride + first, o.x.stride, o.codes.codes + at * inputs + first, inputs, own);
            std::memcpy(&sums, &all[row * kRowFloats], sizeof sums);
            add_group<Panels>(own, panels, bytes, sums);
            std::memcpy(&all[row * kRowFloats], &sums, sizeof sums);
            row += rows;
        };
        while (row + 4 <= count) tile(std::integral_constant<int, 4>{});
        if (row + 2 <= count) tile(std::integral_constant<int, 2>{});
        if (row < count) tile(std::integral_constant<int, 1>{});
    }
    for (int row = 0; row < count; row++) {
        Sums<1, kPanels> sums;
        std::memcpy(&sums, &all[row * kRowFloats], sizeof sums);
        write_sums(o, task.first + row, panel, sums);
    }
}

template <class Panels>
inline void multiply_scaled(const Operands& o, const Task& task) {
    if (task.last - task.first <= kMaxScaledRows) return scaled_rows<Panels>(o, task, task.first);
    constexpr int kPanels = kQuantizedPanels;
    const int64_t bytes = panel_bytes(Panels::kFormat, o.weight.inputs);
    int panel = task.panel;
    const auto at = [&] { return o.panels + (panel - task.panel) * bytes; };
    for (; panel + kPanels <= task.end; panel += kPanels) expanded_groups<Panels, kPanels>(o, task, at(), panel);
    if constexpr (kPanels > 1)
        for (; panel < task.end; panel++) expanded_groups<Panels, 1>(o, task, at(), panel);
}

inline void multiply_any(const Operands& o, int32_t format, const Task& task) {
    switch (format) {
        case kFloat32: return multiply<FloatTile<Float32Panels>>(o, task);
        case kBfloat16:
            if (uses_bf16_dot) return multiply<DotTile>(o, task);
            return multiply<FloatTile<Bfloat16Panels>>(o, task);
        case kFloat16: return multiply<FloatTile<Float16Panels>>(o, task);
        case kFloat8: return multiply_scaled<ScaledPanels<kFloat8>>(o, task);
        case kNf4: return multiply_scaled<ScaledPanels<kNf4>>(o, task);
        case kFp4: return multiply_scaled<ScaledPanels<kFp4>>(o, task);
        default:
            with_format(format, [&](auto kind) {
                if (o.codes.bits == 8) return multiply_quantized<Bytes, kind>(o, task);
                multiply_quantized<Shorts, kind>(o, task);
            });
    }
}

// Converts one row for its weights' layout, in the order of their columns.
inline void encode_row(const Rows& x, int row, const Weight& weight, const Codes& to) {
    const float* from = x.at + row * x.stride;
    thread_local std::vector<float> ordered;
    if (weight.order != nullptr) {
        ordered.resize(weight.inputs);
        for (int k = 0; k < weight.inputs; k++) ordered[k] = from[weight.order[k]];
        from = ordered.data();
    }
    if (!has_bf16_inputs(weight.format)) return encode(from, row, weight.inputs, to);
    int16_t* codes = to.codes + int64_t(row) * weight.inputs;
    for (int k = 0; k < weight.inputs; k++) codes[k] = static_cast<int16_t>(to_bf16(from[k]));
}

// Bytes of rows that stay in the L2 cache while panels are streamed, and rows of which the sums and a piece of the inputs
// stay there while expanded panels are multiplied.
constexpr int64_t kRowsBytes = 192 << 10;
constexpr int kRowsOfExpanded = 256;

inline int rows_of_task(const Weight& weight) {
    if (is_quantized(weight.format) || is_scaled(weight.format)) return kRowsOfExpanded;
    constexpr int kTileRows = FloatTile<Float32Panels>::kMaxRows;
    return std::max<int64_t>(1, kRowsBytes / (int64_t(weight.inputs) * 4 * kTileRows)) * kTileRows;
}

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
    return is_quantized(weight.format) || (has_bf16_inputs(weight.format) && uses_bf16_dot);
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
        team.share(x.count, [&](int row) { encode_row(x, row, weight, codes); });
    const int rows_fit = rows_of_task(weight), num_blocks = (x.count + rows_fit - 1) / rows_fit;
    const int num_panels = cut.twin ? cut.twin : (weight.outputs + kPanel - 1) / kPanel;
    // Whole tiles of several rows, unless the tasks would become uneven. A single row waits for memory in any case.
    const int whole = std::lcm(cut.panels, kQuantizedPanels);
    const int unit = x.count > 1 && is_quantized(weight.format) && whole <= 12 ? whole : cut.panels;
    const int num_units = (num_panels + unit - 1) / unit;
    const int num_parts = count_tasks(num_panels, num_units, team.size());
    const auto compute = [&](const Task& task) { multiply_parts(weight, x, codes, out, task); };
    team.share(num_blocks * num_parts, [&](int index) {
        const int block = index / num_parts, part = index % num_parts;
        const Task task{x.count * block / num_blocks, x.count * (block + 1) / num_blocks,
                        num_units * part / num_parts * unit,
                        std::min(num_panels, num_units * (part + 1) / num_parts * unit)};
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
        return Codes{codes.codes + at, codes.scales + at / kBlock, codes.totals + at / kBlock, codes.sums + at / kHalf, codes.bits};
    };
    if (is_encoded(weight))
        team.share(num_heads * x.count, [&](int index) {
            const int h = index / x.count;
            encode_row(head_rows(h), index % x.count, weight, head_codes(h));
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

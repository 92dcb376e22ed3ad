// Tiles of products with scaled floats: sums of each group of inputs, which are multiplied by its scale.
//
// A few rows read codes as they are packed. For more rows, a group of a few panels is expanded once, to bfloat16 where all
// codes are such numbers and else to floats, which stay in the L1 cache while all rows are multiplied with them. The order
// of the operations is the same, and so are the bits.
#pragma once

#include "tiles.hpp"

namespace warren {

// The codes of a group as they are packed, after its scales.
template <int32_t kFormat_>
struct ScaledPanels {
    static constexpr int32_t kFormat = kFormat_;
    // What a group is expanded to, in which order its inputs are added, and what its scale is multiplied by.
    using Expanded = std::conditional_t<kFormat == kFloat8, Bfloat16Panels, Float32Panels>;
    static constexpr bool kOddFirst = Expanded::kOddFirst;
    static constexpr float kUnit = kFormat == kFloat8 ? 256 : 1;

    template <bool is_odd>
    static void read(const uint8_t* codes, int pair, Floats (&to)[kVectors]) {
        if constexpr (kFormat == kFloat8) return read_float8(codes + (2 * pair + is_odd) * kPanel, to);
        for (int v = 0; v < kVectors; v++) {
            const Ints both = ints_of<false>(codes + pair * kPanel + v * kLanes);
            to[v] = looked_up(values_of(kFormat), is_odd ? both & 15 : both >> 4);
        }
    }
};

// Adds the sums of a group, whose scales are at `scales`, `bytes` from one panel to the next.
template <class Panels, int kRows, int kPanels>
inline void add_group(const Sums<kRows, kPanels>& group, const uint8_t* scales, int64_t bytes, Sums<kRows, kPanels>& sums) {
    for (int p = 0; p < kPanels; p++)
        for (int v = 0; v < kVectors; v++) {
            const Floats scale = load<Floats>(scales + p * bytes + v * kLanes * 4) * Panels::kUnit;
            for (int r = 0; r < kRows; r++) sums[r][p][v] = multiply_add(group[r][p][v], scale, sums[r][p][v]);
        }
}

template <class Panels, int kRows, int kPanels>
inline void scaled_tile(const float* x, int64_t stride, const uint8_t* panels, int inputs, Sums<kRows, kPanels>& sums) {
    constexpr int kInputs = group_inputs(Panels::kFormat);
    const int64_t bytes = panel_bytes(Panels::kFormat, inputs);
    for (int first = 0; first < inputs; first += kInputs, x += kInputs, panels += group_bytes(Panels::kFormat)) {
        Sums<kRows, kPanels> group = {};
        for (int pair = 0; pair < kInputs / 2; pair++) {
            const uint8_t* codes = panels + 4 * kPanel;
            add_input<Panels::kOddFirst, Panels>(x, stride, codes, bytes, pair, group);
            add_input<!Panels::kOddFirst, Panels>(x, stride, codes, bytes, pair, group);
        }
        add_group<Panels>(group, panels, bytes, sums);
    }
}

// A group of a few panels, expanded.
template <class Panels, int kPanels>
struct ExpandedGroup {
    static constexpr int kInputs = group_inputs(Panels::kFormat);

    alignas(64) uint32_t weights[kPanels][panel_bytes(Panels::Expanded::kFormat, kInputs) / 4];

    void expand(const uint8_t* from, int64_t bytes) {
        for (int p = 0; p < kPanels; p++) {
            const uint8_t* codes = from + p * bytes + 4 * kPanel;
            for (int pair = 0; pair < kInputs / 2; pair++) {
                Floats even[kVectors], odd[kVectors];
                Panels::template read<false>(codes, pair, even);
                Panels::template read<true>(codes, pair, odd);
                for (int v = 0; v < kVectors; v++)
                    if constexpr (Panels::Expanded::kFormat == kBfloat16) {
                        const Words both = reinterpret_cast<Words>(even[v]) >> 16 | reinterpret_cast<Words>(odd[v]);
                        store(&weights[p][pair * kPanel + v * kLanes], both);
                    } else {
                        store(&weights[p][2 * pair * kPanel + v * kLanes], even[v]);
                        store(&weights[p][(2 * pair + 1) * kPanel + v * kLanes], odd[v]);
                    }
            }
        }
    }

    // Adds the products with rows of inputs, at the group's first input. `codes` are the same as bfloat16 numbers, if the
    // processor multiplies such numbers.
    template <int kRows>
    void add(const float* x, int64_t stride, const int16_t* codes, int64_t codes_stride, Sums<kRows, kPanels>& sums) const {
        const auto* panels = reinterpret_cast<const uint8_t*>(weights);
        if constexpr (Panels::Expanded::kFormat == kBfloat16)
            if (uses_bf16_dot) return dot_tile<kRows, kPanels>(codes, codes_stride, panels, kInputs, sums);
        tile<typename Panels::Expanded, kRows, kPanels>(x, stride, panels, kInputs, sums);
    }
};

}  // namespace warren

// Tiles of products with quantized weights: integer sums of each group of inputs, which become floats with their scales.
//
// A tile reads codes as they are packed. Where that takes long and there are many rows, some blocks of a few panels are
// expanded to bytes once, which stay in the L1 cache while all rows are multiplied with them. An output is the sum over
// its groups in their order in both cases, and integer sums are exact, so that the bits are the same.
#pragma once

#include <type_traits>

#include "codes.hpp"
#include "tile_registers.hpp"
#include "tiles.hpp"

namespace warren {

template <int kRows, int kPanels>
using Counts = Ints[kRows][kPanels][kVectors];

// 16-bit products of adjacent lanes, added in pairs to 32-bit sums.
inline Ints add_products(Ints sums, Ints a, Ints b) {
#if WARREN_LANES == 8
    return sums + reinterpret_cast<Ints>(_mm256_madd_epi16((__m256i)a, (__m256i)b));
#elif defined(__AVX512VNNI__)
    return reinterpret_cast<Ints>(_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b));
#elif defined(__AVX512BW__)
    return sums + reinterpret_cast<Ints>(_mm512_madd_epi16((__m512i)a, (__m512i)b));
#else
    const auto *x = reinterpret_cast<const __m256i*>(&a), *y = reinterpret_cast<const __m256i*>(&b);
    __m256i both[2] = {_mm256_madd_epi16(x[0], y[0]), _mm256_madd_epi16(x[1], y[1])};
    return sums + load<Ints>(both);
#endif
}

// Adds the products of four unsigned bytes of weights and four signed bytes of inputs to each sum. Sums of two products are
// only exact in 16 bits if the weights are below 128, so that wide weights are split.
template <bool is_wide>
inline Ints add_byte_products(Ints sums, Words weights, Ints inputs) {
#if WARREN_LANES == 16 && defined(__AVX512VNNI__)
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)inputs));
#elif defined(__ARM_FEATURE_DOTPROD)
    for (int i = 0; i < kLanes / 4; i++) {
        const int8x16_t w = load<int8x16_t>(reinterpret_cast<const char*>(&weights) + 16 * i);
        const int8x16_t x = load<int8x16_t>(reinterpret_cast<const char*>(&inputs) + 16 * i);
        int32x4_t sum = load<int32x4_t>(reinterpret_cast<const char*>(&sums) + 16 * i);
        if constexpr (is_wide) {
            // The upper bit is -128 in a signed byte.
            const int8x16_t top = vdupq_n_s8(-128);
            sum = vsubq_s32(vdotq_s32(sum, vbicq_s8(w, top), x), vdotq_s32(vdupq_n_s32(0), vandq_s8(w, top), x));
        } else {
            sum = vdotq_s32(sum, w, x);
        }
        store(reinterpret_cast<char*>(&sums) + 16 * i, sum);
    }
    return sums;
#else
    const __m256i ones = _mm256_set1_epi16(1);
    for (int i = 0; i < kLanes / 8; i++) {
        const __m256i w = reinterpret_cast<const __m256i*>(&weights)[i], x = reinterpret_cast<const __m256i*>(&inputs)[i];
        const auto dot = [&](__m256i part) { return _mm256_madd_epi16(_mm256_maddubs_epi16(part, x), ones); };
        __m256i& sum = reinterpret_cast<__m256i*>(&sums)[i];
        if constexpr (is_wide) {
            const __m256i top = _mm256_set1_epi8(-128);
            sum = _mm256_add_epi32(sum, dot(_mm256_and_si256(w, top)));
            sum = _mm256_add_epi32(sum, dot(_mm256_andnot_si256(top, w)));
        } else {
            sum = _mm256_add_epi32(sum, dot(w));
        }
    }
    return sums;
#endif
}

// Inputs as integers of 8 bits.
struct Bytes {
    static constexpr int kBytes = 1;

    // `x` is a quad of inputs of the first row, `weights` has the codes of one quad.
    template <bool is_wide, int kRows, int kPanels>
    static void add(const uint8_t* x, int64_t stride, const Words (&weights)[kPanels][kVectors],
                    Counts<kRows, kPanels>& counts) {
        for (int r = 0; r < kRows; r++) {
            const Ints input = load<int32_t>(x + r * stride) - Ints{};
            for (int p = 0; p < kPanels; p++)
                for (int v = 0; v < kVectors; v++)
                    counts[r][p][v] = add_byte_products<is_wide>(counts[r][p][v], weights[p][v], input);
        }
    }
};

// Inputs as integers of 16 bits. The first and the third weight of a quad are two factors of 16 bits, and the others.
struct Shorts {
    static constexpr int kBytes = 2;

    template <bool is_wide, int kRows, int kPanels>
    static void add(const uint8_t* x, int64_t stride, const Words (&weights)[kPanels][kVectors],
                    Counts<kRows, kPanels>& counts) {
        for (int half = 0; half < 2; half++) {
            Words pairs[kPanels][kVectors];
            for (int p = 0; p < kPanels; p++)
                for (int v = 0; v < kVectors; v++) pairs[p][v] = (weights[p][v] >> 8 * half) & 0x00ff00ffu;
            for (int r = 0; r < kRows; r++) {
                const Ints input = load<int32_t>(x + r * stride + 4 * half) - Ints{};
                for (int p = 0; p < kPanels; p++)
                    for (int v = 0; v < kVectors; v++)
                        counts[r][p][v] = add_products(counts[r][p][v], input, reinterpret_cast<Ints>(pairs[p][v]));
            }
        }
    }
};

// The inputs of a tile, from its first row on.
struct Encoded {
    const uint8_t* codes;
    const float *scales, *totals;
    const int32_t* sums;
    int inputs;

    template <class Integers>
    static Encoded of(const Codes& codes, int64_t row, int inputs) {
        const int64_t at = row * inputs;
        return {reinterpret_cast<const uint8_t*>(codes.codes) + at * Integers::kBytes, codes.scales + at / kBlock,
                codes.totals + at / kBlock, codes.sums + at / kHalf, inputs};
    }

    // The integers' sum over a group of a block, times -`offset`.
    template <int kGroups>
    int32_t less(int row, int block, int group, int offset) const {
        const int32_t* both = sums + int64_t(row) * (inputs / kHalf) + 2 * block;
        return -offset * (kGroups == 1 ? both[0] + both[1] : both[group]);
    }

    // The scale times the integers' sum over a group.
    template <int kGroups>
    float total(int row, int block, int group) const {
        const int64_t at = int64_t(row) * (inputs / kBlock) + block;
        return kGroups == 1 ? totals[at] : scales[at] * static_cast<float>(sums[2 * at + group]);
    }
};

// Panels as they are packed, from a block with a header on.
template <int32_t kFormat>
struct PackedPanels {
    static constexpr Layout kForm = layout(kFormat);
    static constexpr int kGroups = kForm.groups, kSpan = quad_span(kFormat);
    static constexpr bool kHasLeast = kForm.has_minima || kFormat == kQ4_0;  // Q4_0's offset is part of its minimum
    static constexpr bool kIsWide = kForm.offset == 128;  // codes exceed 127
    static constexpr int kOffset = kFormat == kQ4_0 ? 0 : kForm.offset;

    const uint8_t* first;
    int64_t bytes;  // of a panel

    static constexpr int low(int step) { return low_quad(kFormat, step); }
    int offset() const { return kOffset; }

    const uint8_t* header(int panel, int block) const {
        return first + panel * bytes + block / kForm.blocks * headed_bytes(kFormat);
    }
    const uint8_t* block(int panel, int block) const {
        return header(panel, block) + header_bytes(kFormat) + block % kForm.blocks * block_bytes(kFormat);
    }

    // The codes of a step's two quads for kLanes outputs, from `output` on.
    void read(int panel, int block, int step, int output, Words& low, Words& high) const {
        const uint8_t* at = this->block(panel, block) + output * 4;
        const auto row = [&](int plane, int index) { return load<Words>(at + plane + index * kRow); };
        const int quad = low_quad(kFormat, step), later = quad + kSpan;
        if constexpr (kForm.bits == 8) {
            low = row(0, quad), high = row(0, later);
        } else {
            constexpr int kAbove4 = kForm.bits & 4 ? 4 : 0, kAbove2 = kAbove4 + (kForm.bits & 2);
            low = high = Words{};
            if constexpr ((kForm.bits & 4) != 0) {
                const Words both = row(codes_at(kFormat), step);
                low = both & 0x0f0f0f0fu, high = (both >> 4) & 0x0f0f0f0fu;
            }
            if constexpr ((kForm.bits & 2) != 0) {
                const Words first = row(plane2_at(kFormat), quad % 2), second = row(plane2_at(kFormat), later % 2);
                low |= ((first >> quad / 2 * 2) & 0x03030303u) << kAbove4;
                high |= ((second >> later / 2 * 2) & 0x03030303u) << kAbove4;
            }
            if constexpr ((kForm.bits & 1) != 0) {
                const Words bits = row(plane1_at(kFormat), 0);
                low |= ((bits >> quad) & 0x01010101u) << kAbove2;
                high |= ((bits >> later) & 0x01010101u) << kAbove2;
            }
            if constexpr (kForm.values != nullptr) low = looked_up(kForm.values, low), high = looked_up(kForm.values, high);
        }
    }

    // What codes are multiplied by, and what is added for each unit of the inputs' sum.
    void read_scales(int panel, int block, int group, int output, Floats& scale, Floats& least) const {
        const uint8_t *head = header(panel, block), *own = this->block(panel, block) + group * kPanel + output;
        if constexpr (kFormat == kMxfp4) {
            scale = exponent_scales(head + output);
        } else {
            scale = from_half(reinterpret_cast<const uint16_t*>(head) + output);
        }
        if constexpr (kForm.has_minima) least = from_half(reinterpret_cast<const uint16_t*>(head) + kPanel + output);
        if constexpr (kFormat == kQ4_0) least = scale * -8.0f;
        if constexpr (kForm.scales == kSigned) scale = scale * floats_of<true>(own);
        if constexpr (kForm.scales == kUnsigned) {
            scale = scale * floats_of<false>(own);
            least = -(least * floats_of<false>(own + minima_at(kFormat)));
        }
        if constexpr (kForm.scales == kNibbles) {
            const Ints both = ints_of<false>(own);
            scale = scale * __builtin_convertvector(both & 15, Floats);
            least = -(least * __builtin_convertvector(both >> 4, Floats));
        }
    }

    // Panels come from memory while other blocks are multiplied. The first blocks of the `num_panels` panels after these
    // follow the last block. There may be no such block.
    void prefetch(int panel, int block, int num_blocks, int num_panels) const {
        const bool is_later = block >= num_blocks;
        const uint8_t* from = this->block(is_later ? panel + num_panels : panel, is_later ? block - num_blocks : block);
        for (int at = 0; at < headed_bytes(kFormat) / kForm.blocks + 63; at += 64) __builtin_prefetch(from + at);
    }
};

constexpr int kExpandedBlocks = 8;

// Some blocks of a few panels, whose codes are bytes.
template <int kGroups_, bool has_least, bool is_wide>
struct ExpandedPanels {
    static constexpr int kGroups = kGroups_, kSpan = 1, kMaxPanels = 3;
    static constexpr bool kHasLeast = has_least, kIsWide = is_wide;

    alignas(64) uint8_t codes[kMaxPanels][kExpandedBlocks][8][kRow];
    float scales[kMaxPanels][kExpandedBlocks][kGroups][kPanel], leasts[kMaxPanels][kExpandedBlocks][kGroups][kPanel];
    int codes_offset;

    static constexpr int low(int step) { return 2 * step; }
    int offset() const { return codes_offset; }
    void prefetch(int, int, int, int) const {}

    void read(int panel, int block, int step, int output, Words& low, Words& high) const {
        low = load<Words>(codes[panel][block][2 * step] + output * 4);
        high = load<Words>(codes[panel][block][2 * step + 1] + output * 4);
    }

    void read_scales(int panel, int block, int group, int output, Floats& scale, Floats& least) const {
        scale = load(scales[panel][block][group] + output);
        if constexpr (kHasLeast) least = load(leasts[panel][block][group] + output);
    }

    template <int32_t kFormat>
    void expand(const PackedPanels<kFormat>& from, int num_panels, int first, int num_blocks, int all_blocks) {
        codes_offset = from.offset();
        for (int p = 0; p < num_panels; p++)
            for (int b = 0; b < num_blocks; b++)
                for (int output = 0; output < kPanel; output += kLanes) {
                    if (output == 0) from.prefetch(p, first + b + kExpandedBlocks, all_blocks, num_panels);
#pragma GCC unroll 4
                    for (int step = 0; step < 4; step++) {
                        Words low, high;
                        from.read(p, first + b, step, output, low, high);
                        store(codes[p][b][from.low(step)] + output * 4, low);
                        store(codes[p][b][from.low(step) + from.kSpan] + output * 4, high);
                    }
                    for (int g = 0; g < kGroups; g++) {
                        Floats scale{}, least{};
                        from.read_scales(p, first + b, g, output, scale, least);
                        store(scales[p][b][g] + output, scale);
                        if constexpr (kHasLeast) store(leasts[p][b][g] + output, least);
                    }
                }
    }
};

template <int32_t kFormat>
using ExpandedFrom =
    ExpandedPanels<PackedPanels<kFormat>::kGroups, PackedPanels<kFormat>::kHasLeast, PackedPanels<kFormat>::kIsWide>;

// Adds the products with blocks 0 .. num_blocks - 1 of the panels, which are blocks `first` .. of the inputs. Only several
// rows of one panel, which take longer than memory, gain by prefetching. The processor reads ahead by itself, and further
// than the few buffers of the first-level cache allow.
template <class Integers, int kRows, int kPanels, class Panels>
inline void quantized_tile(const Encoded& x, const Panels& panels, int first, int num_blocks, Sums<kRows, kPanels>& sums) {
    constexpr int kSteps = 4 / Panels::kGroups;
    const int64_t stride = int64_t(x.inputs) * Integers::kBytes;
    const int row_blocks = x.inputs / kBlock;
    for (int b = 0; b < num_blocks; b++) {
        constexpr int kAhead = 4;  // blocks
        if constexpr (kRows > 1 && kPanels == 1) panels.prefetch(0, b + kAhead, row_blocks, 1);
        const uint8_t* inputs = x.codes + (first + b) * kBlock * Integers::kBytes;
#pragma GCC unroll 2
        for (int g = 0; g < Panels::kGroups; g++) {
            Counts<kRows, kPanels> counts;
            for (int r = 0; r < kRows; r++) {
                const Ints begin = x.template less<Panels::kGroups>(r, first + b, g, panels.offset()) - Ints{};
                for (int p = 0; p < kPanels; p++)
                    for (int v = 0; v < kVectors; v++) counts[r][p][v] = begin;
            }
#pragma GCC unroll 4
            for (int i = 0; i < kSteps; i++) {
                const int step = g * kSteps + i;
                Words low[kPanels][kVectors], high[kPanels][kVectors];
                for (int p = 0; p < kPanels; p++)
                    for (int v = 0; v < kVectors; v++) panels.read(p, b, step, v * kLanes, low[p][v], high[p][v]);
                const uint8_t* at = inputs + 4 * Panels::low(step) * Integers::kBytes;
                Integers::template add<Panels::kIsWide, kRows, kPanels>(at, stride, low, counts);
                Integers::template add<Panels::kIsWide, kRows, kPanels>(at + 4 * Panels::kSpan * Integers::kBytes, stride,
                                                                        high, counts);
            }
            for (int p = 0; p < kPanels; p++)
                for (int v = 0; v < kVectors; v++) {
                    Floats scale, least;
                    panels.read_scales(p, b, g, v * kLanes, scale, least);
                    for (int r = 0; r < kRows; r++) {
                        Floats& sum = sums[r][p][v];
                        const Floats count = __builtin_convertvector(counts[r][p][v], Floats);
                        sum = multiply_add(count * x.scales[int64_t(r) * row_blocks + first + b], scale, sum);
                        if constexpr (Panels::kHasLeast)
                            sum = multiply_add(broadcast(x.template total<Panels::kGroups>(r, first + b, g)), least, sum);
                    }
                }
        }
    }
}

// As `quantized_tile`, in tile registers, for up to 16 rows of inputs of 8 bits. The rows' sums of floats are `all`
// [num_rows][kPanels][kPanel].
template <int kPanels, class Panels>
static void register_tile(const Encoded& x, int num_rows, const Panels& panels, int first, int num_blocks, float* all) {
    constexpr int kGroups = Panels::kGroups, kQuads = 8 / kGroups;
    alignas(64) int32_t counts[kExpandedBlocks * kGroups][kRegisterRows][kPanel];
    TileShapes shapes;
    for (int set = 0; set < 2; set++) {  // so that a product need not wait for the one before it
        shapes.set(set, num_rows, 4 * kPanel);
        shapes.set(2 + set, num_rows, 4 * kQuads);
        shapes.set(4 + set, kQuads, kRow);
    }
    begin_tiles(shapes);
    const int num_parts = num_blocks * kGroups, row_blocks = x.inputs / kBlock;
    for (int p = 0; p < kPanels; p++) {
        const auto count = [&](auto set, int part) {
            clear_tile<set>();
            load_tile<2 + set>(x.codes + first * kBlock + part * 4 * kQuads, x.inputs);
            load_tile<4 + set>(panels.codes[p][part / kGroups][part % kGroups * kQuads], kRow);
            multiply_tiles<set, 2 + set, 4 + set>();
            store_tile<set>(counts[part], sizeof counts[part][0]);
        };
        int part = 0;
        for (; part + 2 <= num_parts; part += 2)
            count(std::integral_constant<int, 0>{}, part), count(std::integral_constant<int, 1>{}, part + 1);
        if (part < num_parts) count(std::integral_constant<int, 0>{}, part);
        for (int r = 0; r < num_rows; r++)
            for (int v = 0; v < kVectors; v++) {
                float* sums = all + (r * kPanels + p) * kPanel + v * kLanes;
                Floats sum = load(sums);
                for (part = 0; part < num_parts; part++) {
                    const int b = part / kGroups, g = part % kGroups;
                    Floats scale, least;
                    panels.read_scales(p, b, g, v * kLanes, scale, least);
                    const Ints all_counts = load<Ints>(counts[part][r] + v * kLanes) +
                                            x.template less<kGroups>(r, first + b, g, panels.offset());
                    const Floats products = __builtin_convertvector(all_counts, Floats);
                    sum = multiply_add(products * x.scales[int64_t(r) * row_blocks + first + b], scale, sum);
                    if constexpr (Panels::kHasLeast)
                        sum = multiply_add(broadcast(x.template total<kGroups>(r, first + b, g)), least, sum);
                }
                store(sums, sum);
            }
    }
    end_tiles();
}

}  // namespace warren

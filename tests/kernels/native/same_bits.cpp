// Computes with every operation of the library, and prints a digest of the bits of each result. Compiled for two
// processors, it prints the same.
//
//     same_bits MATRICES
//
// The file has one matrix after another: format, outputs, inputs and the bytes of a row as int32, then the rows.
#include <cstdio>
#include <fstream>
#include <string>

#include "decoder.hpp"
#include "sampling.hpp"

using namespace warren;

namespace {

uint32_t random_state = 1;

float random_float() {
    random_state = random_state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(random_state) >> 8) / 8388608.0f;
}

template <class Number = float>
std::vector<Number> numbers(size_t count, float factor = 1, float shift = 0) {
    std::vector<Number> all(count);
    for (auto& one : all) one = static_cast<Number>(random_float() * factor + shift);
    return all;
}

// What lives as long as the program: structures of the library own nothing.
template <class Content>
auto* kept(Content content) {
    return (new Content(std::move(content)))->data();
}

template <class Number>
void print(const std::string& name, const Number* values, size_t count) {
    uint64_t digest = 14695981039346656037u;  // FNV-1a
    const auto* bytes = reinterpret_cast<const unsigned char*>(values);
    for (size_t i = 0; i < count * sizeof(Number); i++) digest = (digest ^ bytes[i]) * 1099511628211u;
    std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(digest));
}

Team& team() {
    static Team one(2);
    return one;
}

Weight packed(int32_t format, const uint8_t* rows, int64_t row_bytes, int outputs, int inputs) {
    const int num_panels = (outputs + kPanel - 1) / kPanel;
    const int64_t bytes = panel_bytes(format, inputs);
    auto* panels = static_cast<uint8_t*>(std::aligned_alloc(64, (num_panels * bytes + 63) / 64 * 64));
    std::memset(panels, 0, num_panels * bytes);
    for (int p = 0; p < num_panels; p++)
        pack_panel(format, rows + p * kPanel * row_bytes, std::min(kPanel, outputs - p * kPanel), inputs, panels + p * bytes);
    return {panels, nullptr, format, outputs, inputs, num_panels, nullptr};
}

Weight matrix(int outputs, int inputs) {
    const auto rows = numbers(size_t(outputs) * inputs, 0.2f);
    std::vector<uint16_t> halves(rows.size());
    for (size_t i = 0; i < rows.size(); i++) halves[i] = to_bf16(rows[i]);
    return packed(kBfloat16, reinterpret_cast<const uint8_t*>(halves.data()), int64_t(inputs) * 2, outputs, inputs);
}

Norm norm(int width, NormKind kind = kRmsNorm) {
    return {kept(numbers(width, 0.1f, 1)), kind == kLayerNorm ? kept(numbers(width, 0.1f)) : nullptr, kind, 1e-5f};
}

void products(const char* path) {
    std::ifstream file(path, std::ios::binary);
    int32_t header[4];
    while (file.read(reinterpret_cast<char*>(header), sizeof header)) {
        const auto [format, outputs, inputs, row_bytes] = header;
        std::vector<uint8_t> rows(size_t(outputs) * row_bytes);
        file.read(reinterpret_cast<char*>(rows.data()), rows.size());
        const Weight weight = packed(format, rows.data(), row_bytes, outputs, inputs);
        for (int count : {1, 2, 7, 33}) {
            std::vector<float> x = numbers(size_t(count) * inputs, 3), out(size_t(count) * outputs);
            for (int r = 0; r < count; r++) round_inputs(x.data() + r * inputs, inputs, format);
            std::vector<int16_t> codes(x.size());
            std::vector<float> scales(x.size()), totals(x.size());
            std::vector<int32_t> sums(x.size());
            for (int bits : {8, 16}) {
                const Codes encoded{codes.data(), scales.data(), totals.data(), sums.data(), bits};
                team().run([&] { linear(team(), {x.data(), inputs, count}, encoded, weight, {out.data(), outputs, false}); });
                print("product " + std::to_string(format) + " " + std::to_string(bits) + " " + std::to_string(count), out.data(), out.size());
            }
        }
        std::vector<float> row(inputs);
        unpack_row(weight, outputs - 1, row.data());
        print("row " + std::to_string(format), row.data(), row.size());
    }
}

constexpr int kHidden = 96, kHeads = 6, kKvHeads = 2, kHeadDim = 16, kBlockSize = 8, kBlocks = 40, kVocabulary = 131;

// A layer whose parts are filled in by the cases.
Layer plain() {
    Layer layer{};
    layer.before_attention = norm(kHidden), layer.before_feed_forward = norm(kHidden, kLayerNorm);
    layer.multiplier = layer.feed_forward_multiplier = layer.scalar = 1;
    layer.mlp = {matrix(2 * 64, kHidden), matrix(kHidden, 64), kSilu, 1, {}, 1};
    return layer;
}

void attends(Layer& layer, const Rule& rule) {
    layer.qkv = matrix((kHeads + 2 * kKvHeads) * kHeadDim, kHidden);
    layer.attention_output = matrix(kHidden, kHeads * kHeadDim);
    layer.num_heads = kHeads, layer.num_kv_heads = kKvHeads, layer.head_dim = kHeadDim;
    layer.rope_table = kept(numbers(256 * kHeadDim));
    layer.query_norm = norm(kHeadDim), layer.key_norm = norm(kHeadDim);
    layer.rule = rule;
}

Layer with_attention() {
    Layer layer = plain();
    attends(layer, {kept(numbers(kHeads)), kept(numbers(kHeads)), 0.25f, 5, 20, 0});
    return layer;
}

Layer with_experts() {
    Layer layer = with_attention();
    auto* all = new std::vector<Mlp>;
    for (int e = 0; e < 5; e++) all->push_back({matrix(2 * 32, kHidden), matrix(kHidden, 32), kGeluTanh, 1, {}, 1});
    auto* experts = new Experts{};
    experts->experts = all->data(), experts->router = matrix(5, kHidden), experts->correction = kept(numbers(5));
    experts->count = 5, experts->top_k = 2, experts->scores = kSigmoid, experts->is_normalized = 1;
    experts->num_groups = experts->num_chosen_groups = 1, experts->scale = 1.5f;
    layer.experts = experts;
    return layer;
}

Layer recurrent(int size, int outputs) {
    Layer layer = plain();
    layer.qkv = matrix(size, kHidden), layer.attention_output = matrix(kHidden, outputs);
    return layer;
}

Convolution convolution(int size) { return {kept(numbers(4 * size)), kept(numbers(size)), size, 4}; }

Layer with_delta() {
    auto* delta = new Delta{matrix(8, kHidden), convolution(2 * 2 * 24 + 4 * 32), kept(numbers(4, 0.5f, -1)),
                            kept(numbers(4)), norm(32), 4, 2, 24, 32, 1};
    Layer layer = recurrent(delta->convolution.size + 4 * 32, 4 * 32);
    layer.delta = delta;
    return layer;
}

// With heads of 48 elements, whose columns are computed kPanel at a time.
Layer with_kimi_delta() {
    constexpr int kRank = 24, kDeltaHeads = 2, kDim = 48, kSize = kDeltaHeads * kDim;
    auto* kimi = new KimiDelta{{matrix(2 * kRank + kDeltaHeads, kHidden), convolution(3 * kSize),
                                kept(numbers(kDeltaHeads, 0.5f, 1)), kept(numbers(kSize)), norm(kDim), kDeltaHeads,
                                kDeltaHeads, kDim, kDim, 1},
                               matrix(kSize, kRank), matrix(kSize, kRank)};
    Layer layer = recurrent(3 * kSize, kSize);
    layer.kimi_delta = kimi;
    return layer;
}

// With more channels than a task computes.
Layer with_gated_convolution() {
    constexpr int kSize = kChannels + 40;
    Layer layer = recurrent(3 * kSize, kSize);
    layer.convolution = kept(std::vector<Convolution>{convolution(kSize)});
    return layer;
}

Layer with_state_space() {
    auto* space = new StateSpace{convolution(6 * 32 + 2 * 2 * 20), norm(6 * 32), nullptr, kept(numbers(6)),
                                 kept(numbers(6, 0.5f, -1)), kept(numbers(6)), 6, 32, 2, 20, 0, 0, 100};
    Layer layer = recurrent(6 * 32 + space->convolution.size + 6, 6 * 32);
    layer.state_space = space;
    return layer;
}

// Attention beside a recurrence, whose results have different factors.
Layer with_attention_beside() {
    Layer layer = with_state_space();
    std::vector<Layer> beside{with_attention()};
    layer.multiplier = 0.75f, beside[0].multiplier = 0.5f;
    layer.beside = kept(std::move(beside));
    return layer;
}

Layer with_selective_scan() {
    auto* scan = new SelectiveScan{convolution(192), matrix(8 + 2 * 12, 192), matrix(192, 8), {}, {}, {},
                                   kept(numbers(12 * 192, 0.5f, -1)), kept(numbers(192)), 12};
    Layer layer = recurrent(2 * 192, 192);
    layer.selective_scan = scan;
    return layer;
}

// A prompt in two steps, and a single token, with the state of recurrent layers between them.
void steps(const std::string& name, const Layer& layer, CacheType type) {
    const std::vector<Layer> layers{layer, with_attention()};
    const Model model{layers.data(), matrix(kVocabulary, kHidden), norm(kHidden, kLayerNorm), norm(kHidden), matrix(kVocabulary, kHidden), nullptr, nullptr, 2, 8, 3, 1, 0};
    const int64_t layer_bytes = int64_t(kBlocks) * kBlockSize * kKvHeads * kHeadDim * 4;
    std::vector<uint8_t> keys(2 * layer_bytes), values(2 * layer_bytes);
    const Cache cache{keys.data(), values.data(), type, kBlockSize, kKvHeads, kHeadDim};
    const std::vector<Place> places{{0, 0}, {0, 1}};
    const std::vector<int32_t> states{0, 0};
    Workspace workspace;
    int done = 0;
    for (int count : {37, 26, 1}) {
        std::vector<int64_t> tokens(count), positions(count), slots(count), sampled(count);
        for (int t = 0; t < count; t++) {
            positions[t] = slots[t] = done + t, sampled[t] = t;
            tokens[t] = (done + t) * 7 % kVocabulary;
        }
        // The last group has the blocks of states: half of them to read, and half to write.
        constexpr int kTable = 16, kStateBlocks = 8;
        std::vector<int32_t> tables(2 * kTable);
        for (int b = 0; b < kTable; b++) tables[b] = b, tables[kTable + b] = 16 + b;
        if (count == 26) std::rotate(tables.begin() + kTable, tables.begin() + kTable + kStateBlocks, tables.end());
        const std::vector<int32_t> starts{0, count}, lens{done + count};
        std::vector<float> logits(size_t(count) * kVocabulary);
        const Step step{tokens.data(), positions.data(), slots.data(), sampled.data(), logits.data(),
                        {tables.data(), starts.data(), lens.data(), 1, kTable}, count, places.data(), states.data(), 1,
                        kStateBlocks, 2, count, count, nullptr};
        Forward forward(team(), workspace, model, cache, layer_bytes, step);
        team().run([&] { forward.run(); });
        print(name + " " + std::to_string(count), logits.data(), logits.size());
        done += count;
    }
}

void draws() {
    std::vector<float> logits = numbers(1000, 9), room(1001), values(20);
    const Logits row{logits.data(), 1000};
    const float floor = filter_floor(row, 0.8f, {50, 0.9f, 0.01f}, room.data());
    print("floor", &floor, 1);
    for (float uniform : {0.0f, 0.37f, 0.999f}) {
        const int64_t token = draw(row, 0.8f, floor, uniform);
        print("draw", &token, 1);
    }
    std::vector<int64_t> tokens(20);
    float total;
    rank(row, 20, total, values.data(), tokens.data());
    print("ranks", values.data(), 20), print("total", &total, 1), print("tokens", tokens.data(), 20);
}

}  // namespace

int main(int, char** arguments) {
    products(arguments[1]);
    for (CacheType type : {kCacheFloat32, kCacheBfloat16, kCacheFloat8})
        steps("attention " + std::to_string(type), with_attention(), type);
    steps("experts", with_experts(), kCacheFloat32);
    steps("delta rule", with_delta(), kCacheFloat32);
    steps("Kimi's delta rule", with_kimi_delta(), kCacheFloat32);
    steps("gated convolution", with_gated_convolution(), kCacheFloat32);
    steps("state space", with_state_space(), kCacheFloat32);
    steps("attention beside a state space", with_attention_beside(), kCacheFloat32);
    steps("selective scan", with_selective_scan(), kCacheFloat32);
    draws();
    return 0;
}

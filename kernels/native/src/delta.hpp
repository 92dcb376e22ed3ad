// Linear attention by the gated delta rule (Yang et al., arXiv:2412.06464).
#pragma once

#include "convolution.hpp"

namespace warren {

constexpr int kMaxKeyDim = 256;  // values are of a multiple of kPanel
constexpr int kWide = 32;        // adjacent columns of a head's matrix, which are computed together
constexpr float kUnitEps = 1e-6f;

// See worker.model.spec.DeltaNet. The state of a layer is that of the convolution, then the matrices of all heads. The
// columns of a matrix, [key_dim, value_dim], do not depend on one another: kWide of them, or kPanel, follow one another
// for all rows.
struct Delta {
    Weight rates;             // [2 * num_heads]: how much of a correction is made, then how much of the state fades
    Convolution convolution;  // of queries, keys and values
    const float* decay;       // [num_heads]
    const float* decay_bias;  // [num_heads]
    Norm norm;                // of each head's result
    int32_t num_heads;
    int32_t num_key_heads;
    int32_t key_dim;
    int32_t value_dim;
    float greatest_strength;  // the greatest part of a correction that is made

    int keys_size() const { return num_key_heads * key_dim; }
    int values_size() const { return num_heads * value_dim; }
    int columns() const { return value_dim % kWide ? kPanel : kWide; }
    int64_t matrices() const { return int64_t(convolution.num_taps - 1) * convolution.size; }
};

inline Floats sigmoid(Floats x) { return 1.0f / (exponential(-maximum(broadcast(-88.0f), x)) + 1.0f); }

// The rates of a token become parts of corrections, and factors of states.
inline void finish_rates(const Delta& delta, float* rates) {
    const int num_heads = delta.num_heads;
    float* decays = rates + num_heads;
    for (int h = 0; h < num_heads; h += kLanes) {
        const int left = num_heads - h;
        const Floats fading = softplus(load_first(decays + h, left) + load_first(delta.decay_bias + h, left));
        store_first(rates + h, sigmoid(load_first(rates + h, left)) * delta.greatest_strength, left);
        store_first(decays + h, exponential(-maximum(load_first(delta.decay + h, left) * fading, Floats{})), left);
    }
}

// Gives each head the length `length`.
inline void normalize_heads(float* heads, int num_heads, int head_dim, float length) {
    for (int h = 0; h < num_heads; h++) {
        float* head = heads + h * head_dim;
        scale(head, head_dim, length / std::sqrt(centered_sum(head, head_dim, 0, true) + kUnitEps));
    }
}

// The tokens of a sequence in some columns of a head's matrix. Sums go through the rows from the first to the last.
template <int kColumns>
inline void delta_rule(const Recurring& step, const Delta& delta, const float* rates, int sequence, int head, int column) {
    constexpr int kCount = kColumns / kLanes;
    const int key_dim = delta.key_dim, num_heads = delta.num_heads, num_floats = key_dim * kColumns;
    const int64_t offset = delta.matrices() + (int64_t(head) * delta.value_dim + column) * key_dim;
    const int key_head = head / (num_heads / delta.num_key_heads), place = head * delta.value_dim + column;
    alignas(64) float matrix[kMaxKeyDim * kColumns];
    if (step.has_state(sequence))
        step.states.read(step.blocks_to_read(sequence), step.first_piece, offset, num_floats, matrix);
    else
        std::memset(matrix, 0, size_t(num_floats) * 4);
    for (int64_t t = step.first_token(sequence); t < step.last_token(sequence); t++) {
        const float *query = step.from + t * step.from_stride + key_head * key_dim, *key = query + delta.keys_size();
        const float* value = step.from + t * step.from_stride + 2 * delta.keys_size() + place;
        const float strength = rates[t * 2 * num_heads + head], decay = rates[(t * 2 + 1) * num_heads + head];
        Floats known[kCount] = {}, correction[kCount], found[kCount] = {};
        for (int k = 0; k < key_dim; k++)
            for (int v = 0; v < kCount; v++)
                known[v] = multiply_add(load(matrix + k * kColumns + v * kLanes), broadcast(key[k]), known[v]);
        for (int v = 0; v < kCount; v++) correction[v] = (load(value + v * kLanes) - known[v] * decay) * strength;
        for (int k = 0; k < key_dim; k++)
            for (int v = 0; v < kCount; v++) {
                float* at = matrix + k * kColumns + v * kLanes;
                const Floats now = multiply_add(broadcast(key[k]), correction[v], load(at) * decay);
                store(at, now);
                found[v] = multiply_add(now, broadcast(query[k]), found[v]);
            }
        for (int v = 0; v < kCount; v++) store(step.to + t * step.to_stride + place + v * kLanes, found[v]);
    }
    step.states.write(step.blocks_to_write(sequence), step.first_piece, offset, num_floats, matrix);
}

// A head's result is normalized, and multiplied with the SiLU of its gate.
inline void finish_head(const Delta& delta, const float* gate, float* head) {
    normalize(delta.norm, head, delta.value_dim, head);
    for (int v = 0; v < delta.value_dim; v += kLanes) store(head + v, load(head + v) * silu(load(gate + v)));
}

// `rates` are the products with `Delta::rates`, which are overwritten.
inline void gated_delta_rule(const Recurring& step, const Delta& delta, float* rates, int num_tokens) {
    const int num_heads = delta.num_heads, columns = delta.columns(), num_parts = delta.value_dim / columns;
    convolve(step, delta.convolution, [&](Kept& kept, int64_t t, int first, int) {
        float* channels = step.from + t * step.from_stride + first;
        kept.add([&](int d, int left) { return load_first(channels + d, left); },
                 [&](int d, int left, Floats sums) { store_first(channels + d, silu(sums), left); });
    });
    step.team.share(num_tokens, [&](int t) {
        float* queries = step.from + t * step.from_stride;
        normalize_heads(queries, delta.num_key_heads, delta.key_dim, 1.0f / std::sqrt(float(delta.key_dim)));
        normalize_heads(queries + delta.keys_size(), delta.num_key_heads, delta.key_dim, 1.0f);
        finish_rates(delta, rates + int64_t(t) * 2 * num_heads);
    });
    step.team.share(step.batch.num_seqs * num_heads * num_parts, [&](int task) {
        const int sequence = task / (num_heads * num_parts), head = task / num_parts % num_heads;
        const int column = task % num_parts * columns;
        if (columns == kWide)
            delta_rule<kWide>(step, delta, rates, sequence, head, column);
        else
            delta_rule<kPanel>(step, delta, rates, sequence, head, column);
    });
    step.team.share(num_tokens, [&](int t) {
        const float* gates = step.from + t * step.from_stride + delta.convolution.size;
        float* heads = step.to + t * step.to_stride;
        for (int h = 0; h < num_heads; h++) finish_head(delta, gates + h * delta.value_dim, heads + h * delta.value_dim);
        round_inputs(heads, delta.values_size(), step.format);
    });
}

}  // namespace warren

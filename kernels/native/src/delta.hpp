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

// The queries of a token, and the keys after them.
inline void unit_heads(const Delta& delta, float* queries) {
    normalize_heads(queries, delta.num_key_heads, delta.key_dim, 1.0f / std::sqrt(float(delta.key_dim)));
    normalize_heads(queries + delta.keys_size(), delta.num_key_heads, delta.key_dim, 1.0f);
}

// The parts of corrections that are made, one of each head, and the factors of the state: one of each head, or of each
// row of each head. `stride` is the number of floats from one token to the next.
struct Rates {
    const float* strengths;
    const float* decays;
    int64_t stride;
};

// Some columns of a head's matrix in the cache: rows that follow one another, before a step and after it.
struct MatrixRows {
    float* from;
    float* to;
    int count;
};

constexpr int kMaxRuns = kMaxKeyDim;

// Where these columns are. False if a row is divided between pieces of the cache. The matrix of a new sequence is cleared.
inline bool find_rows(const Recurring& step, int sequence, int64_t offset, int num_floats, int columns, MatrixRows (&runs)[kMaxRuns],
                      int& num_runs) {
    const auto found = [&](const int32_t* blocks, const auto& take) {
        return step.states.find(blocks, step.first_piece, offset, num_floats, columns, take);
    };
    num_runs = 0;
    const bool is_whole = found(step.blocks_to_write(sequence), [&](int index, float* at, int count) {
        runs[index] = {at, at, count};
        num_runs = index + 1;
    });
    if (!is_whole) return false;
    if (step.has_state(sequence))
        found(step.blocks_to_read(sequence), [&](int index, float* at, int) { runs[index].from = at; });
    else
        for (int r = 0; r < num_runs; r++) std::memset(runs[r].to, 0, size_t(runs[r].count) * columns * 4);
    return true;
}

// What a token has for a head.
struct HeadToken {
    const float* query;
    const float* key;
    const float* value;
    const float* decays;  // of all rows, or of each row
    float strength;
};

// Corrects some columns of a head's matrix with a token, whose correction is `correction`, and reads them for its query.
// Meanwhile what they have for the key of the next token, if there is a next token, is added to `known`: rows are then
// loaded only once for each token.
template <int kColumns, bool kByRow, bool kHasNext>
inline void correct(const MatrixRows* runs, int num_runs, const HeadToken& token, const HeadToken& next,
                    const Floats (&correction)[kColumns / kLanes], Floats (&known)[kColumns / kLanes], float* to) {
    constexpr int kCount = kColumns / kLanes;
    Floats found[kCount] = {}, sums[kCount] = {};
    for (int r = 0, k = 0; r < num_runs; r++) {
        const float* from = runs[r].from;
        float* at = runs[r].to;
        for (const int end = k + runs[r].count; k < end; k++, from += kColumns, at += kColumns) {
            const Floats key = broadcast(token.key[k]), query = broadcast(token.query[k]);
            const Floats decay = broadcast(token.decays[kByRow ? k : 0]);
            const Floats next_key = broadcast(!kHasNext ? 0.0f : kByRow ? next.key[k] * next.decays[k] : next.key[k]);
            for (int v = 0; v < kCount; v++) {
                const Floats now = multiply_add(key, correction[v], load(from + v * kLanes) * decay);
                store(at + v * kLanes, now);
                found[v] = multiply_add(now, query, found[v]);
                if (kHasNext) sums[v] = multiply_add(now, next_key, sums[v]);
            }
        }
    }
    for (int v = 0; v < kCount; v++) store(to + v * kLanes, found[v]), known[v] = sums[v];
}

// The tokens of a sequence in some columns of a head's matrix. Sums go through the rows from the first to the last.
template <int kColumns, bool kByRow>
inline void delta_rule(const Recurring& step, const Delta& delta, const Rates& rates, int sequence, int head, int column) {
    constexpr int kCount = kColumns / kLanes;
    const int key_dim = delta.key_dim, num_floats = key_dim * kColumns;
    const int64_t offset = delta.matrices() + (int64_t(head) * delta.value_dim + column) * key_dim;
    const int key_head = head / (delta.num_heads / delta.num_key_heads), place = head * delta.value_dim + column;
    MatrixRows runs[kMaxRuns];
    int num_runs;
    alignas(64) float copy[kMaxKeyDim * kColumns];
    const bool is_in_place = find_rows(step, sequence, offset, num_floats, kColumns, runs, num_runs);
    if (!is_in_place) {
        num_runs = 1, runs[0] = {copy, copy, key_dim};
        if (step.has_state(sequence))
            step.states.read(step.blocks_to_read(sequence), step.first_piece, offset, num_floats, copy);
        else
            std::memset(copy, 0, size_t(num_floats) * 4);
    }
    const auto token = [&](int64_t t) {
        const float* row = step.from + t * step.from_stride;
        const float* decays = rates.decays + t * rates.stride + head * (kByRow ? key_dim : 1);
        return HeadToken{row + key_head * key_dim, row + key_head * key_dim + delta.keys_size(),
                         row + 2 * delta.keys_size() + place, decays, rates.strengths[t * rates.stride + head]};
    };
    const int64_t first = step.first_token(sequence), last = step.last_token(sequence);
    HeadToken now = token(first);
    Floats known[kCount] = {}, correction[kCount];
    for (int r = 0, k = 0; r < num_runs; r++)
        for (int i = 0; i < runs[r].count; i++, k++) {
            const Floats weight = broadcast(kByRow ? now.key[k] * now.decays[k] : now.key[k]);
            for (int v = 0; v < kCount; v++)
                known[v] = multiply_add(load(runs[r].from + i * kColumns + v * kLanes), weight, known[v]);
        }
    for (int64_t t = first; t < last; t++) {
        for (int v = 0; v < kCount; v++)
            correction[v] = (load(now.value + v * kLanes) - (kByRow ? known[v] : known[v] * now.decays[0])) * now.strength;
        float* to = step.to + t * step.to_stride + place;
        if (t + 1 < last) {
            const HeadToken next = token(t + 1);
            correct<kColumns, kByRow, true>(runs, num_runs, now, next, correction, known, to);
            now = next;
        } else {
            correct<kColumns, kByRow, false>(runs, num_runs, now, now, correction, known, to);
        }
        for (int r = 0; r < num_runs; r++) runs[r].from = runs[r].to;
    }
    if (!is_in_place) step.states.write(step.blocks_to_write(sequence), step.first_piece, offset, num_floats, copy);
}

// The tokens of all sequences. With `kByRow`, the factors are those of the rows of each head.
template <bool kByRow>
inline void delta_rule_of_heads(const Recurring& step, const Delta& delta, const Rates& rates) {
    const int num_heads = delta.num_heads, columns = delta.columns(), num_parts = delta.value_dim / columns;
    step.team.share(step.batch.num_seqs * num_heads * num_parts, [&](int task) {
        const int sequence = task / (num_heads * num_parts), head = task / num_parts % num_heads;
        const int column = task % num_parts * columns;
        if (columns == kWide)
            delta_rule<kWide, kByRow>(step, delta, rates, sequence, head, column);
        else
            delta_rule<kPanel, kByRow>(step, delta, rates, sequence, head, column);
    });
}

// Queries, keys and values are convolved, and a SiLU follows.
inline void convolve_heads(const Recurring& step, const Delta& delta) {
    convolve(step, delta.convolution, [&](Kept& kept, int64_t t, int first, int) {
        float* channels = step.from + t * step.from_stride + first;
        kept.add([&](int d, int left) { return load_first(channels + d, left); },
                 [&](int d, int left, Floats sums) { store_first(channels + d, silu(sums), left); });
    });
}

// Each head's result of a token is normalized, and multiplied with the activation of its gate.
template <class Activation>
inline void finish_heads(const Delta& delta, const float* gates, float* heads, const Activation& activation) {
    for (int h = 0; h < delta.num_heads; h++) {
        const float* gate = gates + h * delta.value_dim;
        float* head = heads + h * delta.value_dim;
        normalize(delta.norm, head, delta.value_dim, head);
        for (int v = 0; v < delta.value_dim; v += kLanes) store(head + v, load(head + v) * activation(load(gate + v)));
    }
}

// `rates` are the products with `Delta::rates`, which are overwritten.
inline void gated_delta_rule(const Recurring& step, const Delta& delta, float* rates, int num_tokens) {
    const int64_t stride = 2 * delta.num_heads;
    convolve_heads(step, delta);
    step.team.share(num_tokens, [&](int t) {
        unit_heads(delta, step.from + t * step.from_stride);
        finish_rates(delta, rates + t * stride);
    });
    delta_rule_of_heads<false>(step, delta, {rates, rates + delta.num_heads, stride});
    step.team.share(num_tokens, [&](int t) {
        const float* gates = step.from + t * step.from_stride + delta.convolution.size;
        float* heads = step.to + t * step.to_stride;
        finish_heads(delta, gates, heads, [](Floats gate) { return silu(gate); });
        round_inputs(heads, delta.values_size(), step.format);
    });
}

}  // namespace warren

// Linear attention by a gated delta rule whose states fade element by element of keys: Kimi Delta Attention (Kimi Team,
// arXiv:2510.26692).
#pragma once

#include "delta.hpp"
#include "linear.hpp"

namespace warren {

// See worker.model.spec.KimiDelta. The rates of `delta` are a vector that tells how much fades, a vector of gates, and
// how much of a correction is made; its `decay_bias` is [num_heads * key_dim].
struct KimiDelta {
    Delta delta;
    Weight fading;  // [num_heads * key_dim] of the first vector
    Weight gates;   // [num_heads * value_dim] of the second vector

    int rank() const { return fading.inputs; }
    int row_size() const { return delta.rates.outputs + fading.outputs + gates.outputs; }
};

// The rates of a token become parts of corrections, and factors of the rows of states.
inline void finish_rates(const Delta& delta, float* strengths, float* decays) {
    for (int h = 0; h < delta.num_heads; h += kLanes) {
        const int left = delta.num_heads - h;
        store_first(strengths + h, sigmoid(load_first(strengths + h, left)) * delta.greatest_strength, left);
    }
    for (int h = 0; h < delta.num_heads; h++) {
        const Floats rate = broadcast(delta.decay[h]);
        for (int k = 0; k < delta.key_dim; k += kLanes) {
            const int at = h * delta.key_dim + k, left = delta.key_dim - k;
            const Floats fading = softplus(load_first(decays + at, left) + load_first(delta.decay_bias + at, left));
            store_first(decays + at, exponential(-maximum(rate * fading, Floats{})), left);
        }
    }
}

// `hidden` has the inputs of the layer. `rows` has room for KimiDelta::row_size() floats of each
// token, and `codes` for the rows of all products.
inline void kimi_delta(const Recurring& step, const KimiDelta& kimi, const Rows& hidden, float* rows, const Codes& codes) {
    const Delta& delta = kimi.delta;
    const int rank = kimi.rank(), num_tokens = hidden.count;
    const int64_t stride = kimi.row_size();
    float *strengths = rows + 2 * rank, *decays = rows + delta.rates.outputs, *gates = decays + kimi.fading.outputs;
    linear(step.team, hidden, codes, delta.rates, {rows, stride, false});
    step.team.share(num_tokens, [&](int t) {
        round_inputs(rows + t * stride, rank, kimi.fading.format);
        round_inputs(rows + t * stride + rank, rank, kimi.gates.format);
    });
    linear(step.team, {rows, stride, num_tokens}, codes, kimi.fading, {decays, stride, false});
    linear(step.team, {rows + rank, stride, num_tokens}, codes, kimi.gates, {gates, stride, false});
    convolve_heads(step, delta);
    step.team.share(num_tokens, [&](int t) {
        unit_heads(delta, step.from + t * step.from_stride);
        finish_rates(delta, strengths + t * stride, decays + t * stride);
    });
    delta_rule_of_heads<true>(step, delta, {strengths, decays, stride});
    step.team.share(num_tokens, [&](int t) {
        finish_heads(delta, gates + t * stride, step.to + t * step.to_stride, [](Floats gate) { return sigmoid(gate); });
        round_inputs(step.to + t * step.to_stride, delta.values_size(), step.format);
    });
}

}  // namespace warren

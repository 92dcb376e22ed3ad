// State spaces behind a short convolution: Mamba 2 (Dao and Gu, arXiv:2405.21060). See worker.model.spec.Mamba2.
#pragma once

#include "convolution.hpp"

namespace warren {

// The first product makes gates, what is convolved, and a step for each head. What is convolved are the inputs of the heads,
// then the writes and the reads of all groups.
struct StateSpace {
    Convolution convolution;
    Norm norm;               // of each group's results; or none
    const float* factors;    // of the outputs of the first product; or null
    const float* step_bias;  // [num_heads]
    const float* rates;      // [num_heads], negative
    const float* skips;      // [num_heads]
    int32_t num_heads;
    int32_t head_dim;  // a multiple of kPanel
    int32_t num_groups;
    int32_t state_dim;     // a multiple of 4, at most kMaxStateDim
    int32_t is_gated_last;  // after the norm
    float least_step;
    float greatest_step;

    int size() const { return num_heads * head_dim; }
    float factor(int64_t output) const { return factors == nullptr ? 1.0f : factors[output]; }
};

// The step and the decay of a head's state with a token.
struct Pace {
    float step, decay;
};

inline Pace pace(const StateSpace& space, int head, float made) {
    const Floats open = softplus(broadcast(made + space.step_bias[head]));
    const Floats step = -maximum(broadcast(-space.greatest_step), -maximum(broadcast(space.least_step), open));
    return {step[0], exponential(step * space.rates[head])[0]};
}

// Adds a token to kPanel elements of a head, whose state is [state_dim, kPanel], and reads them. Four sums are kept, because
// each addition would wait for the one before.
inline void advance(float* state, int state_dim, const Pace& pace, const float* inputs, const float* writes,
                    const float* reads, float skip, float* to) {
    Floats scaled[kVectors], sums[4][kVectors] = {};
    for (int v = 0; v < kVectors; v++) scaled[v] = load(inputs + v * kLanes) * pace.step;
    const Floats decay = broadcast(pace.decay);
    for (int n = 0; n < state_dim; n += 4)
        for (int k = 0; k < 4; k++)
            for (int v = 0; v < kVectors; v++) {
                float* at = state + (n + k) * kPanel + v * kLanes;
                const Floats next = multiply_add(load(at), decay, scaled[v] * writes[n + k]);
                store(at, next);
                sums[k][v] = multiply_add(next, broadcast(reads[n + k]), sums[k][v]);
            }
    for (int v = 0; v < kVectors; v++) {
        const Floats sum = (sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v]);
        store(to + v * kLanes, multiply_add(load(inputs + v * kLanes), broadcast(skip), sum));
    }
}

// The states of the heads, which follow the convolution's state. A head's tokens are added in their order.
inline void scan(const Recurring& step, const StateSpace& space) {
    const int size = space.size(), convolved = space.convolution.size, state_dim = space.state_dim;
    const int heads_per_group = space.num_heads / space.num_groups;
    const int64_t first_float = int64_t(space.convolution.num_taps - 1) * convolved;
    step.team.share(step.batch.num_seqs * space.num_heads, [&](int task) {
        const int sequence = task / space.num_heads, head = task % space.num_heads;
        const int64_t first = step.first_token(sequence), last = step.last_token(sequence);
        const int group = head / heads_per_group;
        thread_local std::vector<Pace> paces;
        paces.clear();
        for (int64_t t = first; t < last; t++) {
            const int64_t output = size + convolved + head;
            paces.push_back(pace(space, head, step.from[t * step.from_stride + output] * space.factor(output)));
        }
        alignas(64) float state[kMaxStateDim * kPanel];
        for (int d = head * space.head_dim; d < (head + 1) * space.head_dim; d += kPanel) {
            const int64_t at = first_float + int64_t(d) * state_dim;
            if (step.has_state(sequence))
                step.states.read(step.blocks_to_read(sequence), step.first_piece, at, state_dim * kPanel, state);
            else
                std::memset(state, 0, size_t(state_dim) * kPanel * 4);
            for (int64_t t = first; t < last; t++) {
                const float* inputs = step.from + t * step.from_stride + size;
                const float* writes = inputs + size + group * state_dim;
                advance(state, state_dim, paces[t - first], inputs + d, writes, writes + space.num_groups * state_dim,
                        space.skips[head], step.to + t * step.to_stride + d);
            }
            step.states.write(step.blocks_to_write(sequence), step.first_piece, at, state_dim * kPanel, state);
        }
    });
}

// Multiplies the results of a token with their gates, before or after they are normalized.
inline void gate(const Recurring& step, const StateSpace& space, int64_t t) {
    const int size = space.size(), group_size = size / space.num_groups;
    float *gates = step.from + t * step.from_stride, *results = step.to + t * step.to_stride;
    if (space.factors != nullptr)
        for (int d = 0; d < size; d++) gates[d] *= space.factors[d];
    const auto norm = [&](bool is_now, const float* from, float* to) {
        for (int d = 0; d < size; d += group_size) {
            Norm part = space.norm;
            if (!is_now) part.kind = kNoNorm;
            if (part.weight != nullptr) part.weight += d;
            normalize(part, from + d, group_size, to + d);
        }
    };
    norm(space.is_gated_last, results, results);
    activate_row<kSilu>(gates, results, size);
    norm(!space.is_gated_last, gates, results);
    round_inputs(results, size, step.format);
}

inline void state_space(const Recurring& step, const StateSpace& space) {
    const int size = space.size();
    convolve(step, space.convolution, [&](Kept& kept, int64_t t, int first, int) {
        float* row = step.from + t * step.from_stride + size + first;
        const float* factors = space.factors == nullptr ? nullptr : space.factors + size + first;
        kept.add(
            [&](int d, int left) {
                const Floats inputs = load_first(row + d, left);
                return factors == nullptr ? inputs : inputs * load_first(factors + d, left);
            },
            [&](int d, int left, Floats sums) { store_first(row + d, silu(sums), left); });
    });
    scan(step, space);
    step.team.share(step.batch.query_starts[step.batch.num_seqs], [&](int t) { gate(step, space, t); });
}

}  // namespace warren

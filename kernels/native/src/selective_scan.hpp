// Selective state spaces of single channels: Mamba 1 (Gu and Dao, arXiv:2312.00752). See worker.model.spec.Mamba.
#pragma once

#include "convolution.hpp"
#include "linear.hpp"

namespace warren {

// The first product makes the inputs of all channels, which are convolved, then gates.
struct SelectiveScan {
    Convolution convolution;
    Weight parts;  // of what is convolved: the vector that steps are made from, then writes and reads
    Weight steps;  // of the first part
    Norm norm_of_steps, norm_of_writes, norm_of_reads;  // or none
    const float* rates;  // [state_dim, size], negative
    const float* skips;  // [size]
    int32_t state_dim;   // at most kMaxStateDim

    int size() const { return convolution.size; }  // a multiple of kPanel
    int rank() const { return steps.inputs; }
};

// The tokens of a sequence in kPanel channels, whose state is [state_dim, kPanel]. A token's results replace its steps.
inline void scan_channels(const Recurring& step, const SelectiveScan& scan, const float* parts, int sequence, int channel) {
    const int size = scan.size(), state_dim = scan.state_dim, num_floats = state_dim * kPanel;
    const int64_t at = int64_t(scan.convolution.num_taps - 1) * size + int64_t(channel) * state_dim;
    alignas(64) float state[kMaxStateDim * kPanel];
    if (step.has_state(sequence))
        step.states.read(step.blocks_to_read(sequence), step.first_piece, at, num_floats, state);
    else
        std::memset(state, 0, size_t(num_floats) * 4);
    for (int64_t t = step.first_token(sequence); t < step.last_token(sequence); t++) {
        const float *inputs = step.from + t * step.from_stride + channel, *gates = inputs + size;
        const float *writes = parts + t * scan.parts.outputs + scan.rank(), *reads = writes + state_dim;
        float* to = step.to + t * step.to_stride + channel;
        for (int v = 0; v < kVectors; v++) {
            const int d = v * kLanes;
            const Floats input = load(inputs + d), pace = softplus(load(to + d)), scaled = input * pace;
            Floats total{};
            for (int n = 0; n < state_dim; n++) {
                float* kept = state + n * kPanel + d;
                const Floats decay = exponential(pace * load(scan.rates + int64_t(n) * size + channel + d));
                const Floats next = multiply_add(load(kept), decay, scaled * writes[n]);
                store(kept, next);
                total = multiply_add(next, broadcast(reads[n]), total);
            }
            total = multiply_add(input, load(scan.skips + channel + d), total);
            store(to + d, total * silu(load(gates + d)));
        }
        round_inputs(to, kPanel, step.format);
    }
    step.states.write(step.blocks_to_write(sequence), step.first_piece, at, num_floats, state);
}

// `parts` has room for the products with `SelectiveScan::parts`, and `codes` for the rows of all products.
inline void selective_scan(const Recurring& step, const SelectiveScan& scan, float* parts, const Codes& codes, int num_tokens) {
    const int num_parts = scan.parts.outputs, rank = scan.rank(), num_panels = scan.size() / kPanel;
    convolve(step, scan.convolution, [&](Kept& kept, int64_t t, int first, int count) {
        float *channels = step.from + t * step.from_stride + first, *rounded = step.to + t * step.to_stride + first;
        kept.add([&](int d, int left) { return load_first(channels + d, left); },
                 [&](int d, int left, Floats sums) { store_first(channels + d, silu(sums), left); });
        std::memcpy(rounded, channels, size_t(count) * 4);
        round_inputs(rounded, count, scan.parts.format);
    });
    linear(step.team, {step.to, step.to_stride, num_tokens}, codes, scan.parts, {parts, num_parts, false});
    step.team.share(num_tokens, [&](int t) {
        float *vector = parts + int64_t(t) * num_parts, *writes = vector + rank, *reads = writes + scan.state_dim;
        normalize(scan.norm_of_steps, vector, rank, vector);
        normalize(scan.norm_of_writes, writes, scan.state_dim, writes);
        normalize(scan.norm_of_reads, reads, scan.state_dim, reads);
        round_inputs(vector, rank, scan.steps.format);
    });
    linear(step.team, {parts, num_parts, num_tokens}, codes, scan.steps, {step.to, step.to_stride, false});
    step.team.share(step.batch.num_seqs * num_panels, [&](int task) {
        scan_channels(step, scan, parts, task / num_panels, task % num_panels * kPanel);
    });
}

}  // namespace warren

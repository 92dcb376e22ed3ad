// Causal convolutions of a few tokens, whose state is their last inputs.
#pragma once

#include "states.hpp"

namespace warren {

constexpr int kMaxTaps = 8;
constexpr int kChannels = 256;  // of a task

// A causal convolution of each channel.
struct Convolution {
    const float* taps;  // [num_taps, size], the oldest token's first
    const float* bias;  // [size] or null
    int32_t size;
    int32_t num_taps;  // 2 .. kMaxTaps
};

// The inputs of a few channels, of the tokens that the next one depends on.
class Kept {
   public:
    Kept(const Convolution& convolution, int first, int count)
        : convolution_(convolution), first_(first), count_(count), num_kept_(convolution.num_taps - 1) {}

    // The state before the step's tokens of a sequence.
    void read(const Recurring& step, int sequence) {
        if (!step.has_state(sequence)) {
            std::memset(inputs_, 0, sizeof inputs_);
            return;
        }
        for (int k = 0; k < num_kept_; k++)
            step.states.read(step.blocks_to_read(sequence), step.first_piece, offset(k), count_, row(k));
    }

    // The state after the tokens that have been added.
    void write(const Recurring& step, int sequence) {
        for (int k = 0; k < num_kept_; k++)
            step.states.write(step.blocks_to_write(sequence), step.first_piece, offset(k), count_, row(k));
    }

    // Adds a token: `input(d, count)` are its inputs of the channels from d on, and `output(d, count, sums)` takes the
    // results. Products are added from the oldest token on.
    template <class Input, class Output>
    void add(const Input& input, const Output& output) {
        const float *rows[kMaxTaps], *taps[kMaxTaps];
        float* newest = row(num_kept_);
        for (int k = 0; k < convolution_.num_taps; k++) {
            rows[k] = row(k);
            taps[k] = convolution_.taps + int64_t(k) * convolution_.size + first_;
        }
        for (int d = 0; d < count_; d += kLanes) {
            const int left = count_ - d;
            store(newest + d, input(d, left));
            Floats total = convolution_.bias == nullptr ? Floats{} : load_first(convolution_.bias + first_ + d, left);
            for (int k = 0; k < convolution_.num_taps; k++)
                total = multiply_add(load_first(taps[k] + d, left), load(rows[k] + d), total);
            output(d, left, total);
        }
        oldest_ = (oldest_ + 1) % convolution_.num_taps;
    }

   private:
    float* row(int k) { return inputs_[(oldest_ + k) % convolution_.num_taps]; }
    int64_t offset(int k) const { return int64_t(k) * convolution_.size + first_; }

    const Convolution& convolution_;
    const int first_, count_, num_kept_;
    int oldest_ = 0;
    alignas(64) float inputs_[kMaxTaps][kChannels];
};

// Calls `each(kept, token, first, count)` for every token and a few channels at a time, in the order of the tokens. The
// convolution's state is the first part of the layer's state.
template <class Each>
inline void convolve(const Recurring& step, const Convolution& convolution, const Each& each) {
    const int num_chunks = (convolution.size + kChannels - 1) / kChannels;
    step.team.share(step.batch.num_seqs * num_chunks, [&](int task) {
        const int sequence = task / num_chunks, first = task % num_chunks * kChannels;
        const int count = std::min(kChannels, convolution.size - first);
        Kept kept(convolution, first, count);
        kept.read(step, sequence);
        for (int64_t t = step.first_token(sequence); t < step.last_token(sequence); t++) each(kept, t, first, count);
        kept.write(step, sequence);
    });
}

// See worker.model.spec.ShortConv.
inline void gated_convolution(const Recurring& step, const Convolution& convolution) {
    const int size = convolution.size;
    convolve(step, convolution, [&](Kept& kept, int64_t t, int first, int count) {
        const float* parts = step.from + t * step.from_stride + first;
        float* to = step.to + t * step.to_stride + first;
        kept.add([&](int d, int left) { return load_first(parts + d, left) * load_first(parts + 2 * size + d, left); },
                 [&](int d, int left, Floats sums) { store_first(to + d, load_first(parts + size + d, left) * sums, left); });
        round_inputs(to, count, step.format);
    });
}

}  // namespace warren

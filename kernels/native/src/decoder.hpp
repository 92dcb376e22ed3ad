// One step of a decoder of the Llama family: the loop of worker/model/decoders/native.py in one call.
#pragma once

#include <chrono>
#include <memory>

#include "elementwise.hpp"
#include "linear.hpp"

namespace warren {

struct Layer {
    const float* input_norm;
    Weight qkv;
    const float* query_norm;  // null if the family has none
    const float* key_norm;
    Weight attention_output;
    const float* mlp_norm;
    Weight gate_up;
    Weight down;
    int32_t window;
};

struct Model {
    const Layer* layers;
    Weight embedding;
    const float* norm;
    Weight lm_head;
    const float* rope_table;  // [max_positions, head_dim]: cosines, then sines
    int32_t num_layers;
    int32_t num_heads;
    float eps;
    float scale;
};

struct Step {
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* slots;
    const int64_t* sampled_rows;
    float* logits;  // [num_sampled, outputs of lm_head]
    Batch batch;
    int32_t num_tokens;
    int32_t num_sampled;
    double* seconds;  // [kNumParts], added to; or null
};

// The parts of a step for which time is measured. A product includes the norm before it and the processing of its
// outputs: rope and store, silu.
enum Part { kEmbedding, kQkv, kAttention, kAttentionOutput, kGateUp, kDown, kLogits, kNumParts };

// The activations of a step; grows to the largest step so far.
class Workspace {
   public:
    template <class T>
    T* take(size_t count) {
        const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        auto* at = static_cast<T*>(static_cast<void*>(memory_.get() + used_));
        used_ += bytes;
        return at;
    }

    void reserve(size_t bytes) {
        used_ = 0;
        if (bytes <= size_) return;
        size_ = 0;
        memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
        if (!memory_) throw std::bad_alloc();
        size_ = bytes;
    }

   private:
    struct Free {
        void operator()(uint8_t* memory) const { std::free(memory); }
    };
    std::unique_ptr<uint8_t, Free> memory_;
    size_t size_ = 0;
    size_t used_ = 0;
};

class Forward {
   public:
    Forward(Team& team, Workspace& workspace, const Model& model, const Cache& cache, int64_t layer_bytes, const Step& step)
        : team_(team), model_(model), cache_(cache), layer_bytes_(layer_bytes), step_(step),
          tasks_(attention_tasks(step.batch)), caller_(std::this_thread::get_id()), since_(Clock::now()) {
        const Layer& layer = model.layers[0];
        hidden_size_ = model.embedding.inputs;
        qkv_size_ = layer.qkv.outputs;
        attended_size_ = model.num_heads * cache.head_dim;
        mlp_size_ = layer.down.inputs;
        const size_t rows = step.num_tokens;
        const size_t widest = std::max({hidden_size_, attended_size_, mlp_size_});
        has_own_norms_ = step.num_tokens <= kOwnNorms;
        const size_t num_norms = has_own_norms_ ? team.size() : 1;
        const size_t row_floats =
            (1 + num_norms) * hidden_size_ + qkv_size_ + attended_size_ + 2 * mlp_size_ + widest;
        workspace.reserve(rows * 4 * row_floats + 1024);
        hidden_ = workspace.take<float>(rows * hidden_size_);
        normed_ = workspace.take<float>(num_norms * rows * hidden_size_);
        qkv_ = workspace.take<float>(rows * qkv_size_);
        attended_ = workspace.take<float>(rows * attended_size_);
        gate_up_ = workspace.take<float>(rows * 2 * mlp_size_);
        codes_.codes = workspace.take<int16_t>(rows * widest);
        codes_.scales = workspace.take<float>(rows * (widest / kBlock + 1));
        codes_.totals = workspace.take<float>(rows * (widest / kBlock + 1));
    }

    // Called by all threads of the team with their numbers.
    void run(int member) {
        float* normed = normed_ + (has_own_norms_ ? size_t(member) * step_.num_tokens * hidden_size_ : 0);
        team_.share(step_.num_tokens, [&](int t) { unpack_row(model_.embedding, step_.token_ids[t], row(hidden_, t)); });
        lap(kEmbedding);
        for (int index = 0; index < model_.num_layers; index++) {
            const Layer& layer = model_.layers[index];
            const Cache cache = layer_cache(index);
            norm(layer.input_norm, layer.qkv, normed);
            product(kQkv, normed, hidden_size_, layer.qkv, qkv_, false, Cut{cache.head_dim / kPanel},
                    [&](const Task& task) { rope_store(layer, cache, task); });
            attention(layer, cache);
            product(kAttentionOutput, attended_, attended_size_, layer.attention_output, hidden_, true);
            norm(layer.mlp_norm, layer.gate_up, normed);
            gate_up(layer, normed);
            product(kDown, gate_up_, 2 * mlp_size_, layer.down, hidden_, true);
        }
        logits();
    }

   private:
    static constexpr int kOwnNorms = 64;  // rows

    using Clock = std::chrono::steady_clock;

    float* row(float* rows, int64_t index) const { return rows + index * hidden_size_; }

    // Attributes the time since the last lap to this part.
    void lap(Part part) {
        if (step_.seconds == nullptr || std::this_thread::get_id() != caller_) return;
        const auto now = Clock::now();
        step_.seconds[part] += std::chrono::duration<double>(now - since_).count();
        since_ = now;
    }

    // Row `from` of the hidden states, as an input of `next`.
    void norm_row(const float* weight, int64_t from, const Weight& next, float* to) {
        rms_norm(row(hidden_, from), weight, hidden_size_, model_.eps, to);
        round_inputs(to, hidden_size_, next.format);
    }

    // Each thread normalizes a few rows for itself, which is faster than meeting at a barrier.
    void norm(const float* weight, const Weight& next, float* normed) {
        const auto norm_one = [&](int t) { norm_row(weight, t, next, row(normed, t)); };
        if (!has_own_norms_) return team_.share(step_.num_tokens, norm_one);
        for (int t = 0; t < step_.num_tokens; t++) norm_one(t);
    }

    template <class Finish>
    void product(Part part, const float* from, int64_t stride, const Weight& weight, float* to, bool is_added,
                 const Cut& cut, const Finish& finish) {
        linear(team_, {from, stride, step_.num_tokens}, codes_, weight, {to, weight.outputs, is_added}, cut, finish);
        lap(part);
    }

    void product(Part part, const float* from, int64_t stride, const Weight& weight, float* to, bool is_added) {
        product(part, from, stride, weight, to, is_added, Cut{}, [](const Task&) {});
    }

    Cache layer_cache(int index) const {
        Cache cache = cache_;
        cache.keys += index * layer_bytes_;
        cache.values += index * layer_bytes_;
        return cache;
    }

    // The heads whose products a task has computed.
    void rope_store(const Layer& layer, const Cache& cache, const Task& task) {
        const int head_dim = cache.head_dim, num_keys_end = model_.num_heads + cache.num_kv_heads;
        for (int t = task.first; t < task.last; t++) {
            const float* angles = model_.rope_table + step_.positions[t] * head_dim;
            for (int h = task.panel * kPanel / head_dim; h < task.end * kPanel / head_dim; h++) {
                float* head = qkv_ + int64_t(t) * qkv_size_ + h * head_dim;
                if (h < num_keys_end) {
                    const float* weight = h < model_.num_heads ? layer.query_norm : layer.key_norm;
                    if (weight != nullptr) rms_norm(head, weight, head_dim, model_.eps, head);
                    rotate(head, angles, head_dim);
                }
                if (h >= num_keys_end)
                    store_head(cache, cache.values, step_.slots[t], h - num_keys_end, head);
                else if (h >= model_.num_heads)
                    store_head(cache, cache.keys, step_.slots[t], h - model_.num_heads, head);
            }
        }
    }

    void attention(const Layer& layer, const Cache& cache) {
        const Heads heads{qkv_, qkv_size_, attended_, model_.num_heads, model_.scale, layer.window,
                          layer.attention_output.format};
        warren::attention(team_, cache, step_.batch, heads, tasks_);
        lap(kAttention);
    }

    void logits() {
        team_.share(step_.num_sampled, [&](int s) {
            norm_row(model_.norm, step_.sampled_rows[s], model_.lm_head, row(normed_, s));
        });
        linear(team_, {normed_, hidden_size_, step_.num_sampled}, codes_, model_.lm_head,
               {step_.logits, model_.lm_head.outputs, false});
        lap(kLogits);
    }

    // silu(gate) * up, over the gate. If the up half starts within a panel, no task has computed both halves.
    void gate_up(const Layer& layer, const float* normed) {
        const auto gate = [&](int t, int first, int last) {
            float* at = gate_up_ + int64_t(t) * 2 * mlp_size_ + first;
            silu_mul(at, at + mlp_size_, last - first);
            round_inputs(at, last - first, layer.down.format);
        };
        if (mlp_size_ % kPanel) {
            product(kGateUp, normed, hidden_size_, layer.gate_up, gate_up_, false);
            return team_.share(step_.num_tokens, [&](int t) { gate(t, 0, mlp_size_); });
        }
        product(kGateUp, normed, hidden_size_, layer.gate_up, gate_up_, false, Cut{1, mlp_size_ / kPanel},
                [&](const Task& task) {
                    for (int t = task.first; t < task.last; t++) gate(t, task.panel * kPanel, task.end * kPanel);
                });
    }

    Team& team_;
    const Model& model_;
    const Cache& cache_;
    const int64_t layer_bytes_;
    const Step& step_;
    const std::vector<AttentionTask> tasks_;
    const std::thread::id caller_;
    bool has_own_norms_;
    Clock::time_point since_;
    int hidden_size_, qkv_size_, attended_size_, mlp_size_;
    float *hidden_, *normed_, *qkv_, *attended_, *gate_up_;
    Codes codes_{};
};

}  // namespace warren

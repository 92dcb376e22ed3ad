// One step of a decoder: the loop of worker/model/decoders/stack.py in one call.
#pragma once

#include <chrono>
#include <memory>

#include "experts.hpp"

namespace warren {

// One layer: see worker.model.spec.Layer. Kinds that a layer does not have are `kNoNorm`, null or 0.
struct Layer {
    Norm before_attention, after_attention, before_feed_forward, after_feed_forward;
    Norm query_norm, key_norm, value_norm;
    Weight qkv;
    Weight attention_output;
    const float* rope_table;    // [max_positions, head_dim]: cosines, then sines
    const float* temperatures;  // [max_positions], the factors of queries; or null
    const Experts* experts;     // instead of `mlp`; or null
    Rule rule;
    Mlp mlp;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t norms_all_heads;     // the norms of queries and keys have the width of all heads
    int32_t norms_after_rope;
    int32_t is_parallel;
    float multiplier;  // of the results of both parts
    float scalar;      // of the layer's result

    int qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
    int attended_size() const { return num_heads * head_dim; }
};

struct Model {
    const Layer* layers;
    Weight embedding;
    Norm norm;
    Weight lm_head;
    int32_t num_layers;
    float embedding_scale;
    float logit_scale;
    float logit_softcap;  // 0: none
};

// Where the keys and values of a layer are: see worker.model.cache_layout.LayerPlace.
struct Place {
    int32_t group;
    int32_t index;
};

struct Step {
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* slots;  // [num_groups, num_tokens], with `slots_stride` from one group to the next
    const int64_t* sampled_rows;
    float* logits;  // [num_sampled, outputs of lm_head]
    Batch batch;  // with block tables [num_groups, num_seqs, max_num_blocks]
    int64_t slots_stride;
    const Place* places;  // [num_layers]
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

// The longest rows of all layers.
struct Widths {
    int qkv = 0, attended = 0, gate_up = 0, widest = 0;
    int top_k = 0, num_experts = 0, expert_inputs = 0, expert_gate_up = 0;

    explicit Widths(const Model& model) : widest(model.embedding.inputs) {
        for (int i = 0; i < model.num_layers; i++) {
            const Layer& layer = model.layers[i];
            qkv = std::max(qkv, layer.qkv_size());
            attended = std::max(attended, layer.attended_size());
            const Mlp* mlp = layer.experts == nullptr ? &layer.mlp : layer.experts->shared;
            if (mlp != nullptr) gate_up = std::max(gate_up, mlp->gate_up.outputs);
            if (mlp != nullptr) widest = std::max(widest, mlp->down.inputs);
            if (layer.experts == nullptr) continue;
            const Mlp& expert = layer.experts->experts[0];
            top_k = std::max(top_k, layer.experts->top_k);
            num_experts = std::max(num_experts, layer.experts->count);
            expert_gate_up = std::max(expert_gate_up, expert.gate_up.outputs);
            expert_inputs = std::max({expert_inputs, model.embedding.inputs, expert.down.inputs});
        }
        widest = std::max({widest, attended});
    }
};

class Forward {
   public:
    Forward(Team& team, Workspace& workspace, const Model& model, const Cache& cache, int64_t layer_bytes, const Step& step)
        : team_(team), model_(model), cache_(cache), layer_bytes_(layer_bytes), step_(step),
          tasks_(attention_tasks(step.batch)), caller_(std::this_thread::get_id()), since_(Clock::now()) {
        const Widths widths(model);
        hidden_size_ = model.embedding.inputs;
        const size_t rows = step.num_tokens, pairs = rows * widths.top_k;
        has_own_norms_ = step.num_tokens <= kOwnNorms;
        const size_t num_norms = has_own_norms_ ? team.size() : 1;
        const size_t row_bytes = 4 * ((2 + num_norms) * hidden_size_ + widths.qkv + widths.attended + widths.gate_up) +
                                 encoded_bytes(widths.widest) + 4 * widths.num_experts + 4;
        const size_t pair_bytes = 4 * (2 * hidden_size_ + widths.expert_gate_up) + encoded_bytes(widths.expert_inputs) + 12;
        workspace.reserve(rows * row_bytes + pairs * pair_bytes + 2048);
        hidden_ = workspace.take<float>(rows * hidden_size_);
        branch_ = workspace.take<float>(rows * hidden_size_);
        normed_ = workspace.take<float>(num_norms * rows * hidden_size_);
        qkv_ = workspace.take<float>(rows * widths.qkv);
        attended_ = workspace.take<float>(rows * widths.attended);
        gate_up_ = workspace.take<float>(rows * widths.gate_up);
        codes_ = take_codes(workspace, rows, widths.widest);
        mixture_.scores = workspace.take<float>(rows * widths.num_experts);
        mixture_.shared_gates = workspace.take<float>(rows);
        mixture_.chosen = workspace.take<int32_t>(pairs);
        mixture_.weights = workspace.take<float>(pairs);
        mixture_.order = workspace.take<int32_t>(pairs);
        mixture_.inputs = workspace.take<float>(pairs * hidden_size_);
        mixture_.gate_up = workspace.take<float>(pairs * widths.expert_gate_up);
        mixture_.outputs = workspace.take<float>(pairs * hidden_size_);
        mixture_.codes = take_codes(workspace, pairs, widths.expert_inputs);
    }

    // Called by all threads of the team with their numbers.
    void run(int member) {
        float* normed = normed_ + (has_own_norms_ ? size_t(member) * step_.num_tokens * hidden_size_ : 0);
        team_.share(step_.num_tokens, [&](int t) {
            unpack_row(model_.embedding, step_.token_ids[t], row(hidden_, t));
            if (model_.embedding_scale != 1) scale(row(hidden_, t), hidden_size_, model_.embedding_scale);
        });
        lap(kEmbedding);
        for (int index = 0; index < model_.num_layers; index++) {
            const Layer& layer = model_.layers[index];
            norm(layer.before_attention, layer.qkv, normed);
            attention(layer, step_.places[index], normed);
            const Weight& next = layer.experts == nullptr ? layer.mlp.gate_up : layer.experts->experts[0].gate_up;
            if (!layer.is_parallel) norm(layer.before_feed_forward, next, normed);
            if (layer.experts == nullptr)
                feed_forward(layer, normed);
            else
                experts(layer, normed);
            if (layer.scalar != 1)
                team_.share(step_.num_tokens, [&](int t) { scale(row(hidden_, t), hidden_size_, layer.scalar); });
        }
        logits();
    }

   private:
    static constexpr int kOwnNorms = 64;  // rows

    using Clock = std::chrono::steady_clock;

    static size_t encoded_bytes(size_t width) { return 2 * width + 8 * (width / kBlock + 1); }

    static Codes take_codes(Workspace& workspace, size_t rows, size_t width) {
        Codes codes{};
        codes.codes = workspace.take<int16_t>(rows * width);
        codes.scales = workspace.take<float>(rows * (width / kBlock + 1));
        codes.totals = workspace.take<float>(rows * (width / kBlock + 1));
        return codes;
    }

    float* row(float* rows, int64_t index) const { return rows + index * hidden_size_; }

    // Attributes the time since the last lap to this part.
    void lap(Part part) {
        if (step_.seconds == nullptr || std::this_thread::get_id() != caller_) return;
        const auto now = Clock::now();
        step_.seconds[part] += std::chrono::duration<double>(now - since_).count();
        since_ = now;
    }

    // Row `from` of the hidden states, as an input of `next`.
    void norm_row(const Norm& norm, int64_t from, const Weight& next, float* to) {
        normalize(norm, row(hidden_, from), hidden_size_, to);
        round_inputs(to, hidden_size_, next.format);
    }

    // Each thread normalizes a few rows for itself, which is faster than meeting at a barrier.
    void norm(const Norm& norm, const Weight& next, float* normed) {
        const auto norm_one = [&](int t) { norm_row(norm, t, next, row(normed, t)); };
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

    // The layer's part of the cache, which is as large as that of a layer with the longest keys.
    Cache layer_cache(const Layer& layer, const Place& place) const {
        Cache cache = cache_;
        cache.keys += place.index * layer_bytes_;
        cache.values += place.index * layer_bytes_;
        cache.num_kv_heads = layer.num_kv_heads;
        cache.head_dim = layer.head_dim;
        return cache;
    }

    // The step's sequences, with the blocks of a group of layers.
    Batch group_batch(int group) const {
        Batch batch = step_.batch;
        batch.block_tables += int64_t(group) * batch.num_seqs * batch.max_num_blocks;
        return batch;
    }

    // Whether the results of a part are added as they are.
    static bool is_added(const Layer& layer, const Norm& after) { return after.kind == kNoNorm && layer.multiplier == 1; }

    // A product that ends a part: its outputs are normalized, and added to the hidden states.
    void last_product(Part part, const Layer& layer, const Norm& after, const float* from, int64_t stride, const Weight& weight) {
        if (is_added(layer, after)) return product(part, from, stride, weight, hidden_, true);
        product(part, from, stride, weight, branch_, false);
        team_.share(step_.num_tokens, [&](int t) { add_branch(layer, after, t); });
        lap(part);
    }

    void add_branch(const Layer& layer, const Norm& after, int t) {
        float *to = row(hidden_, t), *from = row(branch_, t);
        normalize(after, from, hidden_size_, from);
        for (int d = 0; d < hidden_size_; d++) to[d] += from[d] * layer.multiplier;
    }

    void attention(const Layer& layer, const Place& place, const float* normed) {
        const Cache cache = layer_cache(layer, place);
        const int64_t* slots = step_.slots + place.group * step_.slots_stride;
        const int head_dim = layer.head_dim, num_all = layer.num_heads + 2 * layer.num_kv_heads;
        if (layer.norms_all_heads) {  // no task has computed all heads
            product(kQkv, normed, hidden_size_, layer.qkv, qkv_, false);
            team_.share(step_.num_tokens, [&](int t) {
                float* heads = qkv_ + int64_t(t) * layer.qkv_size();
                float* keys = heads + layer.attended_size();
                normalize(layer.query_norm, heads, layer.attended_size(), heads);
                normalize(layer.key_norm, keys, layer.num_kv_heads * head_dim, keys);
                finish_heads(layer, cache, slots[t], t, 0, num_all);
            });
        } else {
            product(kQkv, normed, hidden_size_, layer.qkv, qkv_, false, Cut{head_dim / kPanel}, [&](const Task& task) {
                for (int t = task.first; t < task.last; t++)
                    finish_heads(layer, cache, slots[t], t, task.panel * kPanel / head_dim, task.end * kPanel / head_dim);
            });
        }
        const Heads heads{qkv_, layer.qkv_size(), attended_, layer.num_heads, layer.rule, layer.attention_output.format};
        warren::attention(team_, cache, group_batch(place.group), heads, tasks_);
        lap(kAttention);
        last_product(kAttentionOutput, layer, layer.after_attention, attended_, layer.attended_size(), layer.attention_output);
    }

    // Normalizes, rotates and stores the heads first .. end - 1 of a token.
    void finish_heads(const Layer& layer, const Cache& cache, int64_t slot, int t, int first, int end) {
        const int head_dim = layer.head_dim, num_heads = layer.num_heads, num_keys_end = num_heads + layer.num_kv_heads;
        const int64_t position = step_.positions[t];
        const float* angles = layer.rope_table + position * head_dim;
        for (int h = first; h < end; h++) {
            float* head = qkv_ + int64_t(t) * layer.qkv_size() + h * head_dim;
            if (h >= num_keys_end) {
                normalize(layer.value_norm, head, head_dim, head);
                store_head(cache, cache.values, slot, h - num_keys_end, head);
                continue;
            }
            const Norm& norm = h < num_heads ? layer.query_norm : layer.key_norm;
            if (!layer.norms_all_heads && !layer.norms_after_rope) normalize(norm, head, head_dim, head);
            rotate(head, angles, head_dim);
            if (layer.norms_after_rope) normalize(norm, head, head_dim, head);
            if (h >= num_heads)
                store_head(cache, cache.keys, slot, h - num_heads, head);
            else if (layer.temperatures != nullptr)
                scale(head, head_dim, layer.temperatures[position]);
        }
    }

    void logits() {
        team_.share(step_.num_sampled, [&](int s) {
            norm_row(model_.norm, step_.sampled_rows[s], model_.lm_head, row(normed_, s));
        });
        linear(team_, {normed_, hidden_size_, step_.num_sampled}, codes_, model_.lm_head,
               {step_.logits, model_.lm_head.outputs, false});
        if (model_.logit_scale != 1 || model_.logit_softcap > 0)
            team_.share(step_.num_sampled, [&](int s) {
                float* logits = step_.logits + int64_t(s) * model_.lm_head.outputs;
                scale(logits, model_.lm_head.outputs, model_.logit_scale);
                if (model_.logit_softcap > 0) soft_cap(logits, model_.lm_head.outputs, model_.logit_softcap);
            });
        lap(kLogits);
    }

    void feed_forward(const Layer& layer, const float* normed) {
        gate_up(layer.mlp, normed);
        last_product(kDown, layer, layer.after_feed_forward, gate_up_, layer.mlp.gate_up.outputs, layer.mlp.down);
    }

    // The activation is written over the gate. If the up half starts within a panel, no task has computed both halves.
    void gate_up(const Mlp& mlp, const float* normed) {
        const int size = mlp.down.inputs, stride = mlp.gate_up.outputs;
        const auto gate = [&](int t, int first, int last) {
            float* at = gate_up_ + int64_t(t) * stride + first;
            activate(mlp.activation, at, mlp.is_gated ? at + size : nullptr, last - first);
            round_inputs(at, last - first, mlp.down.format);
        };
        if (mlp.is_gated && size % kPanel) {
            product(kGateUp, normed, hidden_size_, mlp.gate_up, gate_up_, false);
            return team_.share(step_.num_tokens, [&](int t) { gate(t, 0, size); });
        }
        product(kGateUp, normed, hidden_size_, mlp.gate_up, gate_up_, false, Cut{1, mlp.is_gated ? size / kPanel : 0},
                [&](const Task& task) {
                    const int end = std::min(task.end * kPanel, size);
                    for (int t = task.first; t < task.last; t++) gate(t, task.panel * kPanel, end);
                });
    }

    // A token's experts are added in the order of the router's choice, whatever else is in the step.
    void experts(const Layer& layer, const float* normed) {
        const Experts& experts = *layer.experts;
        const int num_tokens = step_.num_tokens;
        linear(team_, {normed, hidden_size_, num_tokens}, codes_, experts.router, {mixture_.scores, experts.count, false});
        if (experts.shared != nullptr) {
            if (experts.shared_gate.panels != nullptr)
                linear(team_, {normed, hidden_size_, num_tokens}, codes_, experts.shared_gate, {mixture_.shared_gates, 1, false});
            gate_up(*experts.shared, normed);
            product(kGateUp, gate_up_, experts.shared->gate_up.outputs, experts.shared->down, branch_, false);
        }
        team_.share(num_tokens, [&](int t) { choose(experts, mixture_, t); });
        compute_experts(team_, experts, mixture_, normed, hidden_size_, num_tokens);
        team_.share(num_tokens, [&](int t) {
            combine(experts, mixture_, t, hidden_size_, row(branch_, t));
            add_branch(layer, layer.after_feed_forward, t);
        });
        lap(kDown);
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
    int hidden_size_;
    float *hidden_, *branch_, *normed_, *qkv_, *attended_, *gate_up_;
    Codes codes_{};
    Mixture mixture_{};
};

}  // namespace warren

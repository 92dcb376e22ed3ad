// One step of a decoder: the loop of worker/model/decoders/stack.py in one call.
#pragma once

#include <chrono>
#include <memory>

#include "delta.hpp"
#include "experts.hpp"
#include "kimi_delta.hpp"
#include "selective_scan.hpp"
#include "state_space.hpp"

namespace warren {

// What attention over latent vectors (DeepSeek-AI, arXiv:2405.04434) has in addition. A vector, followed by a rotary key, is
// both key and value of all heads. A head's query is multiplied with the matrix that would expand vectors to its keys, and
// its result with the matrix that would expand them to its values.
struct Latent {
    Norm query_norm;
    Weight query_up;  // of compressed queries; without panels, queries are not compressed
    Weight absorb;    // [num_heads * rank, key_dim]
    Weight expand;    // [num_heads * value_dim, rank]
    int32_t rank, key_dim, value_dim, query_rank;
};

// How a layer uses its own input of each token, and the inputs of all layers: see worker.model.spec.LayerInputs.
struct LayerInput {
    Weight gate;       // [size, hidden_size]
    Weight expansion;  // [hidden_size, size]
    Norm norm;
};

struct LayerInputs {
    Weight table;       // [vocab_size, num_layers * size]
    Weight projection;  // [num_layers * size, hidden_size]
    Norm norm;
    int32_t size;
    int32_t activation;
    float table_scale;
    float projection_scale;
    float scale;  // of the sum of both
};

// One layer: see worker.model.spec.Layer. Kinds that a layer does not have are `kNoNorm`, null or 0.
struct Layer {
    Norm before_attention, after_attention, before_feed_forward, after_feed_forward;
    Norm query_norm, key_norm, value_norm;
    Weight qkv;               // or everything that a recurrence makes from the hidden state
    Weight attention_output;  // or the product that ends a recurrence
    const float* rope_table;         // [max_positions, head_dim]: cosines, then sines
    const float* temperatures;       // [max_positions], the factors of queries; or null
    const Experts* experts;          // instead of `mlp`; or null
    const Convolution* convolution;  // a recurrence instead of attention, whose sizes are 0; or null
    const Delta* delta;              // the same
    const KimiDelta* kimi_delta;     // the same
    const StateSpace* state_space;   // the same
    const SelectiveScan* selective_scan;  // the same
    const Latent* latent;            // or null; `qkv` then makes the query, the vector and the rotary key
    const LayerInput* input;         // or null
    const Layer* beside;             // attention or a recurrence with the same input; or null
    Rule rule;
    Mlp mlp;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t norms_all_heads;     // the norms of queries and keys have the width of all heads
    int32_t norms_after_rope;
    int32_t is_parallel;
    int32_t has_gate;  // `qkv` also makes a gate of each result, after the values
    float multiplier;  // of the result of attention, or of the recurrence
    float feed_forward_multiplier;
    float scalar;  // of the layer's result

    int qkv_size() const { return qkv.outputs; }
    int attended_size() const { return num_heads * head_dim; }
    bool is_recurrent() const {
        return convolution != nullptr || delta != nullptr || kimi_delta != nullptr || state_space != nullptr ||
               selective_scan != nullptr;
    }
    bool has_mixer() const { return qkv.panels != nullptr; }  // attention or a recurrence
    bool has_feed_forward() const { return experts != nullptr || mlp.down.panels != nullptr; }

    // The first product after the norm before the feed-forward part. Of the products of experts and of the shared expert,
    // a product with weights of bfloat16, which needs rounded inputs.
    const Weight& feed_forward_product() const {
        if (experts == nullptr) return mlp.gate_up;
        const Weight& first = experts->latent_down.panels ? experts->latent_down : experts->experts[0].gate_up;
        if (experts->shared == nullptr) return first;
        const Weight& shared = experts->shared->gate_up;
        return experts->norms != nullptr || has_bf16_inputs(shared.format) ? shared : first;
    }
};

// How a model that predicts the token after the next makes the input of its layers, of the embedding of the next token and the
// last hidden state of another model: see worker.model.spec.Predictor.
struct Junction {
    Norm embedding_norm;
    Norm hidden_norm;
    Weight projection;  // [hidden_size, 2 * hidden_size]
    int32_t is_hidden_first;  // whether the hidden state is the first half of the projection's inputs
};

struct Model {
    const Layer* layers;
    Weight embedding;
    Norm embedding_norm;  // of embeddings; or none
    Norm norm;
    Weight lm_head;
    const LayerInputs* inputs;  // or null
    const Junction* junction;   // or null
    int32_t num_layers;
    int32_t code_bits;  // of inputs of products with quantized weights: see `Codes`
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
    const Place* places;    // [num_layers]
    const int32_t* states;  // [num_layers]: the first piece of each layer's state; or null
    int32_t state_group;  // whose tables have the blocks of the state to read, then of the state to write
    int32_t num_state_blocks;
    int32_t num_places;
    int32_t num_tokens;
    int32_t num_sampled;
    double* seconds;  // [kNumParts], added to; or null
    float* hidden;  // [num_tokens, hidden_size], the last hidden states after their norm: written, or read by a junction; or null
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
    int rates = 0;   // of the delta rules, or the parts of a selective scan
    int latent = 0;  // queries before they are multiplied, and results after it
    int inputs = 0;  // of all layers
    int joined = 0;  // of a junction
    int top_k = 0, num_experts = 0, expert_inputs = 0, expert_gate_up = 0;
    int expert_latent = 0, expert_outputs = 0;

    explicit Widths(const Model& model) : widest(model.embedding.inputs) {
        if (model.inputs != nullptr) {
            inputs = model.inputs->projection.outputs;
            gate_up = model.inputs->size;
            widest = std::max(widest, model.inputs->size);
        }
        if (model.junction != nullptr) {
            joined = model.junction->projection.inputs;
            widest = std::max(widest, joined);
        }
        for (int i = 0; i < model.num_layers; i++) {
            const Layer& layer = model.layers[i];
            add_mixer(layer);
            if (layer.beside != nullptr) add_mixer(*layer.beside);
            if (layer.latent != nullptr) {
                const Latent& part = *layer.latent;
                const int query_dim = part.key_dim + layer.head_dim - part.rank;
                latent = std::max(latent, layer.num_heads * std::max(query_dim, part.value_dim));
                attended = std::max(attended, layer.attended_size());
                widest = std::max({widest, latent, part.query_rank});
            }
            const Mlp* mlp = layer.experts == nullptr ? &layer.mlp : layer.experts->shared;
            if (mlp != nullptr) gate_up = std::max(gate_up, mlp->gate_up.outputs);
            if (mlp != nullptr) widest = std::max(widest, mlp->down.inputs);
            if (layer.experts == nullptr) continue;
            const Mlp& expert = layer.experts->experts[0];
            top_k = std::max(top_k, layer.experts->top_k);
            num_experts = std::max(num_experts, layer.experts->count);
            expert_gate_up = std::max(expert_gate_up, expert.gate_up.outputs);
            expert_inputs = std::max({expert_inputs, expert.gate_up.inputs, expert.down.inputs});
            expert_outputs = std::max(expert_outputs, expert.gate_up.inputs);
            if (layer.experts->latent_down.panels) expert_latent = std::max(expert_latent, expert.gate_up.inputs);
        }
        widest = std::max({widest, attended, expert_latent});
    }

    void add_mixer(const Layer& layer) {
        qkv = std::max(qkv, layer.qkv_size());
        attended = std::max(attended, layer.attention_output.inputs);
        if (layer.delta != nullptr) rates = std::max(rates, layer.delta->rates.outputs);
        if (layer.kimi_delta != nullptr) rates = std::max(rates, layer.kimi_delta->row_size());
        if (layer.selective_scan != nullptr) rates = std::max(rates, layer.selective_scan->parts.outputs);
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
        const size_t row_bytes = 4 * (3 * hidden_size_ + widths.qkv + widths.attended + widths.gate_up) +
                                 4 * (widths.latent ? widths.latent + widths.attended : 0) + 4 * (widths.inputs + widths.joined) +
                                 encoded_bytes(widths.widest) + 4 * (widths.num_experts + widths.rates + widths.expert_latent) + 4;
        const size_t pair_bytes = 4 * (2 * widths.expert_outputs + widths.expert_gate_up) + encoded_bytes(widths.expert_inputs) + 12;
        workspace.reserve(rows * row_bytes + pairs * pair_bytes + 4096);
        hidden_ = workspace.take<float>(rows * hidden_size_);
        branch_ = workspace.take<float>(rows * hidden_size_);
        normed_ = workspace.take<float>(rows * hidden_size_);
        qkv_ = workspace.take<float>(rows * widths.qkv);
        attended_ = workspace.take<float>(rows * widths.attended);
        gate_up_ = workspace.take<float>(rows * widths.gate_up);
        if (widths.latent) {
            absorbed_ = workspace.take<float>(rows * widths.attended);
            expanded_ = workspace.take<float>(rows * widths.latent);
        }
        rates_ = workspace.take<float>(rows * widths.rates);
        if (widths.inputs) inputs_ = workspace.take<float>(rows * widths.inputs);
        if (widths.joined) joined_ = workspace.take<float>(rows * widths.joined);
        codes_ = take_codes(workspace, rows, widths.widest);
        mixture_.scores = workspace.take<float>(rows * widths.num_experts);
        mixture_.shared_gates = workspace.take<float>(rows);
        mixture_.latents = workspace.take<float>(rows * widths.expert_latent);
        mixture_.chosen = workspace.take<int32_t>(pairs);
        mixture_.weights = workspace.take<float>(pairs);
        mixture_.order = workspace.take<int32_t>(pairs);
        mixture_.inputs = workspace.take<float>(pairs * widths.expert_outputs);
        mixture_.gate_up = workspace.take<float>(pairs * widths.expert_gate_up);
        mixture_.outputs = workspace.take<float>(pairs * widths.expert_outputs);
        mixture_.codes = take_codes(workspace, pairs, widths.expert_inputs);
    }

    // Called by the threads of the team.
    void run() {
        team_.share(step_.num_tokens, [&](int t) {
            unpack_row(model_.embedding, step_.token_ids[t], row(hidden_, t));
            if (model_.embedding_scale != 1) scale(row(hidden_, t), hidden_size_, model_.embedding_scale);
            normalize(model_.embedding_norm, row(hidden_, t), hidden_size_, row(hidden_, t));
        });
        if (model_.inputs != nullptr) layer_inputs(*model_.inputs);
        if (model_.junction != nullptr) join(*model_.junction);
        lap(kEmbedding);
        for (int index = 0; index < model_.num_layers; index++) {
            const Layer& layer = model_.layers[index];
            if (layer.has_mixer()) {
                norm(layer.before_attention, layer.qkv, layer.beside == nullptr ? nullptr : &layer.beside->qkv);
                mix(layer, index);
                if (layer.beside != nullptr) mix(*layer.beside, index);
            }
            if (layer.has_feed_forward()) {
                if (!layer.is_parallel) norm(layer.before_feed_forward, layer.feed_forward_product());
                if (layer.experts == nullptr)
                    feed_forward(layer);
                else
                    experts(layer);
            }
            if (layer.input != nullptr) add_input(layer, index);
            if (layer.scalar != 1)
                team_.share(step_.num_tokens, [&](int t) { scale(row(hidden_, t), hidden_size_, layer.scalar); });
        }
        if (model_.junction == nullptr && step_.hidden != nullptr)
            team_.share(step_.num_tokens, [&](int t) { normalize(model_.norm, row(hidden_, t), hidden_size_, row(step_.hidden, t)); });
        logits();
    }

   private:
    using Clock = std::chrono::steady_clock;

    static size_t encoded_bytes(size_t width) { return 2 * width + 16 * (width / kBlock + 1); }

    Codes take_codes(Workspace& workspace, size_t rows, size_t width) const {
        Codes codes{};
        codes.bits = model_.code_bits;
        codes.codes = workspace.take<int16_t>(rows * width);
        codes.scales = workspace.take<float>(rows * (width / kBlock + 1));
        codes.totals = workspace.take<float>(rows * (width / kBlock + 1));
        codes.sums = workspace.take<int32_t>(2 * rows * (width / kBlock + 1));
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

    // The results may be inputs of another product, too.
    void norm(const Norm& norm, const Weight& next, const Weight* another = nullptr) {
        team_.share(step_.num_tokens, [&](int t) {
            norm_row(norm, t, next, row(normed_, t));
            if (another != nullptr) round_inputs(row(normed_, t), hidden_size_, another->format);
        });
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
    static bool is_added(const Norm& after, float multiplier) { return after.kind == kNoNorm && multiplier == 1; }

    // A product that ends a part: its outputs are normalized, and added to the hidden states.
    void last_product(Part part, const Norm& after, float multiplier, const float* from, int64_t stride, const Weight& weight) {
        if (is_added(after, multiplier)) return product(part, from, stride, weight, hidden_, true);
        product(part, from, stride, weight, branch_, false);
        team_.share(step_.num_tokens, [&](int t) { add_branch(after, multiplier, t); });
        lap(part);
    }

    void add_branch(const Norm& after, float multiplier, int t) {
        float *to = row(hidden_, t), *from = row(branch_, t);
        normalize(after, from, hidden_size_, from);
        for (int d = 0; d < hidden_size_; d++) to[d] += from[d] * multiplier;
    }

    void mix(const Layer& layer, int index) {
        if (layer.is_recurrent())
            recurrence(layer, step_.states[index]);
        else if (layer.latent != nullptr)
            latent_attention(layer, step_.places[index]);
        else
            attention(layer, step_.places[index]);
    }

    void attention(const Layer& layer, const Place& place) {
        const Cache cache = layer_cache(layer, place);
        const int64_t* slots = step_.slots + place.group * step_.slots_stride;
        const int head_dim = layer.head_dim, gates_size = layer.has_gate ? layer.attended_size() : 0;
        const int num_all = (layer.qkv_size() - gates_size) / head_dim;  // without keys and values, queries alone
        if (layer.norms_all_heads) {  // no task has computed all heads
            product(kQkv, normed_, hidden_size_, layer.qkv, qkv_, false);
            team_.share(step_.num_tokens, [&](int t) {
                float* heads = qkv_ + int64_t(t) * layer.qkv_size();
                float* keys = heads + layer.attended_size();
                normalize(layer.query_norm, heads, layer.attended_size(), heads);
                if (num_all > layer.num_heads) normalize(layer.key_norm, keys, layer.num_kv_heads * head_dim, keys);
                finish_heads(layer, cache, slots[t], t, 0, num_all);
            });
        } else {
            product(kQkv, normed_, hidden_size_, layer.qkv, qkv_, false, Cut{head_dim / kPanel}, [&](const Task& task) {
                const int end = std::min(task.end * kPanel / head_dim, num_all);
                for (int t = task.first; t < task.last; t++)
                    finish_heads(layer, cache, slots[t], t, task.panel * kPanel / head_dim, end);
            });
        }
        const int32_t format = layer.attention_output.format;
        const Heads heads{qkv_, layer.qkv_size(), attended_, layer.num_heads, layer.rule, layer.has_gate ? kFloat32 : format};
        warren::attention(team_, cache, group_batch(place.group), heads, tasks_);
        if (layer.has_gate)
            team_.share(step_.num_tokens, [&](int t) {
                const int size = layer.attended_size();
                const float* gates = qkv_ + int64_t(t) * layer.qkv_size() + num_all * head_dim;
                float* results = attended_ + int64_t(t) * size;
                for (int d = 0; d < size; d += kLanes) store(results + d, load(results + d) * sigmoid(load(gates + d)));
                round_inputs(results, size, format);
            });
        lap(kAttention);
        last_product(kAttentionOutput, layer.after_attention, layer.multiplier, attended_, layer.attended_size(), layer.attention_output);
    }

    void recurrence(const Layer& layer, int first_piece) {
        const int64_t block_bytes = int64_t(cache_.block_size) * cache_.slot_bytes();
        const int to_stride = layer.attention_output.inputs;
        product(kQkv, normed_, hidden_size_, layer.qkv, qkv_, false);
        const Recurring step{team_, {cache_.keys, cache_.values, layer_bytes_, block_bytes, step_.num_places},
                             group_batch(step_.state_group), step_.num_state_blocks, first_piece, qkv_, layer.qkv_size(),
                             attended_, to_stride, layer.attention_output.format};
        if (layer.delta != nullptr) {
            const Weight& rates = layer.delta->rates;
            linear(team_, {normed_, hidden_size_, step_.num_tokens}, codes_, rates, {rates_, rates.outputs, false});
            gated_delta_rule(step, *layer.delta, rates_, step_.num_tokens);
        } else if (layer.kimi_delta != nullptr) {
            kimi_delta(step, *layer.kimi_delta, {normed_, hidden_size_, step_.num_tokens}, rates_, codes_);
        } else if (layer.state_space != nullptr) {
            state_space(step, *layer.state_space);
        } else if (layer.selective_scan != nullptr) {
            selective_scan(step, *layer.selective_scan, rates_, codes_, step_.num_tokens);
        } else {
            gated_convolution(step, *layer.convolution);
        }
        lap(kAttention);
        last_product(kAttentionOutput, layer.after_attention, layer.multiplier, attended_, to_stride, layer.attention_output);
    }

    void latent_attention(const Layer& layer, const Place& place) {
        const Latent& latent = *layer.latent;
        Cache cache = layer_cache(layer, place);
        cache.values = cache.keys;
        const int64_t* slots = step_.slots + place.group * step_.slots_stride;
        const int num_heads = layer.num_heads, head_dim = layer.head_dim, rotated = head_dim - latent.rank;
        const int stride = layer.qkv_size(), query_dim = latent.key_dim + rotated;
        product(kQkv, normed_, hidden_size_, layer.qkv, qkv_, false);
        team_.share(step_.num_tokens, [&](int t) {
            float *query = qkv_ + int64_t(t) * stride, *key = query + stride - head_dim;
            if (latent.query_rank > 0) {
                normalize(latent.query_norm, query, latent.query_rank, query);
                round_inputs(query, latent.query_rank, latent.query_up.format);
            }
            normalize(layer.key_norm, key, latent.rank, key);
            rotate(key + latent.rank, layer.rope_table + step_.positions[t] * rotated, rotated);
            store_head(cache, cache.keys, slots[t], 0, key);
        });
        float* queries = latent.query_rank > 0 ? expanded_ : qkv_;
        const int64_t queries_stride = latent.query_rank > 0 ? latent.query_up.outputs : stride;
        if (latent.query_rank > 0) product(kQkv, qkv_, stride, latent.query_up, queries, false);
        team_.share(step_.num_tokens, [&](int t) {
            const int64_t position = step_.positions[t];
            for (int h = 0; h < num_heads; h++) {
                float* query = queries + t * queries_stride + h * query_dim;
                rotate(query + latent.key_dim, layer.rope_table + position * rotated, rotated);
                if (layer.temperatures != nullptr) scale(query, query_dim, layer.temperatures[position]);
                float* to = absorbed_ + (int64_t(t) * num_heads + h) * head_dim + latent.rank;
                std::memcpy(to, query + latent.key_dim, size_t(rotated) * 4);
                round_inputs(query, latent.key_dim, latent.absorb.format);
            }
        });
        linear_heads(team_, num_heads, {queries, queries_stride, step_.num_tokens}, query_dim, codes_, latent.absorb,
                     {absorbed_, layer.attended_size(), false}, head_dim);
        lap(kQkv);
        const Heads heads{absorbed_, layer.attended_size(), attended_, num_heads, layer.rule, latent.expand.format};
        warren::attention(team_, cache, group_batch(place.group), heads, tasks_);
        const int expanded_size = num_heads * latent.value_dim;
        linear_heads(team_, num_heads, {attended_, layer.attended_size(), step_.num_tokens}, head_dim, codes_, latent.expand,
                     {expanded_, expanded_size, false}, latent.value_dim);
        team_.share(step_.num_tokens, [&](int t) {
            round_inputs(expanded_ + int64_t(t) * expanded_size, expanded_size, layer.attention_output.format);
        });
        lap(kAttention);
        last_product(kAttentionOutput, layer.after_attention, layer.multiplier, expanded_, expanded_size, layer.attention_output);
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

    // Makes the input of the first layer of the embeddings, which are in its place, and the other model's hidden states.
    void join(const Junction& junction) {
        const int width = 2 * hidden_size_;
        team_.share(step_.num_tokens, [&](int t) {
            float* to = joined_ + int64_t(t) * width;
            const int hidden = junction.is_hidden_first ? 0 : hidden_size_;
            normalize(junction.embedding_norm, row(hidden_, t), hidden_size_, to + hidden_size_ - hidden);
            normalize(junction.hidden_norm, row(step_.hidden, t), hidden_size_, to + hidden);
            round_inputs(to, width, junction.projection.format);
        });
        product(kEmbedding, joined_, width, junction.projection, hidden_, false);
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

    void feed_forward(const Layer& layer) {
        gate_up(layer.mlp);
        last_product(kDown, layer.after_feed_forward, layer.feed_forward_multiplier, gate_up_, layer.mlp.gate_up.outputs, layer.mlp.down);
    }

    // The activation is written over the gate. If the up half starts within a panel, no task has computed both halves.
    void gate_up(const Mlp& mlp) {
        const int size = mlp.down.inputs, stride = mlp.gate_up.outputs;
        const auto gate = [&](int t, int first, int last) {
            activate(mlp, gate_up_ + int64_t(t) * stride + first, last - first);
        };
        if (mlp.is_gated && size % kPanel) {
            product(kGateUp, normed_, hidden_size_, mlp.gate_up, gate_up_, false);
            return team_.share(step_.num_tokens, [&](int t) { gate(t, 0, size); });
        }
        product(kGateUp, normed_, hidden_size_, mlp.gate_up, gate_up_, false, Cut{1, mlp.is_gated ? size / kPanel : 0},
                [&](const Task& task) {
                    const int end = std::min(task.end * kPanel, size);
                    for (int t = task.first; t < task.last; t++) gate(t, task.panel * kPanel, end);
                });
    }

    // The inputs of all layers: of each token, from its row of a table and from its embedding.
    void layer_inputs(const LayerInputs& inputs) {
        const int width = inputs.projection.outputs;
        norm(Norm{}, inputs.projection);
        product(kEmbedding, normed_, hidden_size_, inputs.projection, inputs_, false);
        team_.share(step_.num_tokens, [&](int t) {
            thread_local std::vector<float> stored;
            stored.resize(width);
            unpack_row(inputs.table, step_.token_ids[t], stored.data());
            float* to = inputs_ + int64_t(t) * width;
            scale(to, width, inputs.projection_scale);
            for (int first = 0; first < width; first += inputs.size)
                normalize(inputs.norm, to + first, inputs.size, to + first);
            for (int d = 0; d < width; d++) to[d] = (to[d] + stored[d] * inputs.table_scale) * inputs.scale;
        });
    }

    void add_input(const Layer& layer, int index) {
        const LayerInputs& inputs = *model_.inputs;
        const LayerInput& input = *layer.input;
        const int size = inputs.size, width = inputs.projection.outputs;
        norm(Norm{}, input.gate);
        product(kGateUp, normed_, hidden_size_, input.gate, gate_up_, false, Cut{}, [&](const Task& task) {
            const int first = task.panel * kPanel, end = std::min(task.end * kPanel, size);
            for (int t = task.first; t < task.last; t++) {
                float* at = gate_up_ + int64_t(t) * size + first;
                activate(inputs.activation, nullptr, at, inputs_ + int64_t(t) * width + index * size + first, end - first);
                round_inputs(at, end - first, input.expansion.format);
            }
        });
        product(kDown, gate_up_, size, input.expansion, branch_, false);
        team_.share(step_.num_tokens, [&](int t) {
            float *to = row(hidden_, t), *from = row(branch_, t);
            normalize(input.norm, from, hidden_size_, from);
            for (int d = 0; d < hidden_size_; d++) to[d] += from[d];
        });
        lap(kDown);
    }

    // A token's experts are added in the order of the router's choice, whatever else is in the step.
    void experts(const Layer& layer) {
        const Experts& experts = *layer.experts;
        const int num_tokens = step_.num_tokens;
        if (experts.norms == nullptr) score(experts);
        if (experts.shared != nullptr) {
            if (experts.shared_gate.panels != nullptr)
                linear(team_, {normed_, hidden_size_, num_tokens}, codes_, experts.shared_gate, {mixture_.shared_gates, 1, false});
            gate_up(*experts.shared);
            product(kGateUp, gate_up_, experts.shared->gate_up.outputs, experts.shared->down, branch_, false);
        }
        if (experts.norms != nullptr) {
            norm(experts.norms->router, experts.router);
            score(experts);
            norm(experts.norms->before, experts.experts[0].gate_up);
        }
        team_.share(num_tokens, [&](int t) { choose(experts, mixture_, t); });
        if (experts.latent_down.panels) {
            latent_experts(experts);
            team_.share(num_tokens, [&](int t) { add_branch(layer.after_feed_forward, layer.feed_forward_multiplier, t); });
            return lap(kDown);
        }
        compute_experts(team_, experts, mixture_, normed_, hidden_size_, num_tokens);
        team_.share(num_tokens, [&](int t) {
            combine(experts, mixture_, t, hidden_size_, row(branch_, t));
            add_branch(layer.after_feed_forward, layer.feed_forward_multiplier, t);
        });
        lap(kDown);
    }

    // Experts of latent vectors, whose result is added to the shared expert's in `branch_`.
    void latent_experts(const Experts& experts) {
        const int size = experts.latent_down.outputs;
        const auto latent = [&](int t) { return mixture_.latents + int64_t(t) * size; };
        product(kGateUp, normed_, hidden_size_, experts.latent_down, mixture_.latents, false);
        team_.share(step_.num_tokens, [&](int t) { round_inputs(latent(t), size, experts.experts[0].gate_up.format); });
        compute_experts(team_, experts, mixture_, mixture_.latents, size, step_.num_tokens);
        team_.share(step_.num_tokens, [&](int t) {
            sum_of_experts(experts, mixture_, t, size, latent(t));
            round_inputs(latent(t), size, experts.latent_up.format);
        });
        product(kDown, mixture_.latents, size, experts.latent_up, branch_, experts.shared != nullptr);
    }

    void score(const Experts& experts) {
        linear(team_, {normed_, hidden_size_, step_.num_tokens}, codes_, experts.router, {mixture_.scores, experts.count, false});
    }

    Team& team_;
    const Model& model_;
    const Cache& cache_;
    const int64_t layer_bytes_;
    const Step& step_;
    const std::vector<AttentionTask> tasks_;
    const std::thread::id caller_;
    Clock::time_point since_;
    int hidden_size_;
    float *hidden_, *branch_, *normed_, *qkv_, *attended_, *gate_up_;
    float* rates_;
    float *absorbed_ = nullptr, *expanded_ = nullptr;  // of latent attention
    float* inputs_ = nullptr;                          // [num_tokens, num_layers * size], of all layers
    float* joined_ = nullptr;                          // [num_tokens, 2 * hidden_size], of a junction
    Codes codes_{};
    Mixture mixture_{};
};

}  // namespace warren

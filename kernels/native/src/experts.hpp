// A mixture of experts: the choice of each token's experts, and their products for all tokens of a step at once.
#pragma once

#include "elementwise.hpp"
#include "linear.hpp"

namespace warren {

struct Mlp {
    Weight gate_up;  // the gate, then the other half; only one product if it is not gated
    Weight down;
    int32_t activation;
    int32_t is_gated;
    float constants[4];  // of the activation
    float gate_multiplier;  // before the activation
};

// The inputs of `down`, from part of a row of the outputs of `gate_up`, which they replace.
inline void activate(const Mlp& mlp, float* at, int count) {
    if (mlp.gate_multiplier != 1) scale(at, count, mlp.gate_multiplier);
    activate(mlp.activation, mlp.constants, at, mlp.is_gated ? at + mlp.down.inputs : nullptr, count);
    round_inputs(at, count, mlp.down.format);
}

enum Scores : int32_t { kSoftmax = 0, kSigmoid = 1, kSoftmaxOfChosen = 2, kSparseMixer = 3 };

// The norms of the router's and the experts' inputs, which read the layer's sum then, and of both kinds of results.
struct ExpertNorms {
    Norm router, before, after, after_shared;
};

// See worker.model.spec.Experts and Router.
struct Experts {
    const Mlp* experts;
    const Mlp* shared;        // or null
    const float* correction;  // [count] or null
    const float* factors;     // [count], of weights; or null
    const ExpertNorms* norms;  // or null
    Weight router;
    Weight shared_gate;  // without panels: there is none
    Weight latent_down;  // of the experts' inputs; without panels: they read the hidden state
    Weight latent_up;    // of the experts' sum
    int32_t count;
    int32_t top_k;
    int32_t scores;
    int32_t is_normalized;
    int32_t num_groups;
    int32_t num_chosen_groups;
    int32_t weighs_inputs;
    float scale;
    float spread;
};

// What a step keeps about the experts of a layer. A pair is a token and one of its experts.
struct Mixture {
    float* scores;        // [num_tokens, count]
    float* shared_gates;  // [num_tokens]
    int32_t* chosen;      // [num_tokens, top_k], in the order of the choice
    float* weights;       // [num_tokens, top_k]
    int32_t* order;       // [pairs]: the row of each pair in the arrays below, where experts follow one another
    float* latents;       // [num_tokens, latent_size]: the experts' inputs, then their sum
    float* inputs;        // [pairs, hidden_size or latent_size]
    float* gate_up;       // [pairs, outputs of gate_up]
    float* outputs;       // [pairs, hidden_size or latent_size]
    Codes codes;          // of inputs, or of the rows of gate_up
};

// The scores as probabilities; exp is a fixed sequence of operations on all processors.
inline void softmax(float* values, int count) {
    float most = values[0];
    for (int i = 1; i < count; i++) most = std::max(most, values[i]);
    float total = 0;
    for (int i = 0; i < count; i++) total += values[i] = exponential(broadcast(values[i] - most))[0];
    for (int i = 0; i < count; i++) values[i] /= total;
}

inline float sigmoid(float x) { return (1.0f / (exponential(-maximum(broadcast(-88.0f), broadcast(x))) + 1.0f))[0]; }

// Hides the experts outside of the groups with the best experts: for sigmoids the two best count together.
inline void choose_groups(const Experts& experts, float* ranks) {
    const int size = experts.count / experts.num_groups;
    std::vector<float> best(experts.num_groups);
    for (int g = 0; g < experts.num_groups; g++) {
        float first = -std::numeric_limits<float>::infinity(), second = first;
        for (int i = g * size; i < (g + 1) * size; i++) {
            if (ranks[i] > first) std::swap(first, second), first = ranks[i];
            else if (ranks[i] > second) second = ranks[i];
        }
        best[g] = experts.scores == kSigmoid && size > 1 ? first + second : first;
    }
    for (int left = experts.num_groups - experts.num_chosen_groups; left > 0; left--) {
        int worst = -1;
        for (int g = 0; g < experts.num_groups; g++)
            if (best[g] > -std::numeric_limits<float>::infinity() && (worst < 0 || best[g] <= best[worst])) worst = g;
        if (worst < 0) return;
        best[worst] = -std::numeric_limits<float>::infinity();
        std::fill(ranks + worst * size, ranks + (worst + 1) * size, -std::numeric_limits<float>::infinity());
    }
}

// The sparse mixer: the weight of a choice is its probability among the experts left whose scores are close to its own.
inline float mixed_weight(const Experts& experts, const float* scores, const std::vector<float>& ranks, float best) {
    float total = 0;
    for (int i = 0; i < experts.count; i++) {
        const bool is_taken = ranks[i] == -std::numeric_limits<float>::infinity();
        if (is_taken || (best - scores[i]) / std::max(std::abs(scores[i]), best) > experts.spread) continue;
        total += exponential(broadcast(ranks[i] - best))[0];
    }
    return 1.0f / total;
}

// Chooses the experts of a token; of equal scores, the first. NaN counts as the lowest score.
inline void choose(const Experts& experts, const Mixture& mixture, int t) {
    float* scores = mixture.scores + int64_t(t) * experts.count;
    if (experts.scores == kSoftmax) softmax(scores, experts.count);
    if (experts.scores == kSigmoid)
        for (int i = 0; i < experts.count; i++) scores[i] = sigmoid(scores[i]);
    thread_local std::vector<float> ranks;
    ranks.assign(scores, scores + experts.count);
    for (int i = 0; i < experts.count; i++) {
        if (experts.correction != nullptr) ranks[i] += experts.correction[i];
        if (ranks[i] != ranks[i]) ranks[i] = std::numeric_limits<float>::lowest();
    }
    if (experts.num_chosen_groups < experts.num_groups) choose_groups(experts, ranks.data());
    int32_t* chosen = mixture.chosen + int64_t(t) * experts.top_k;
    float* weights = mixture.weights + int64_t(t) * experts.top_k;
    for (int k = 0; k < experts.top_k; k++) {
        const auto best = std::max_element(ranks.begin(), ranks.end());
        chosen[k] = static_cast<int32_t>(best - ranks.begin());
        weights[k] = experts.scores == kSparseMixer ? mixed_weight(experts, scores, ranks, *best) : scores[chosen[k]];
        *best = -std::numeric_limits<float>::infinity();
    }
    if (experts.scores == kSoftmaxOfChosen) softmax(weights, experts.top_k);
    if (experts.is_normalized) {
        float total = 0;
        for (int k = 0; k < experts.top_k; k++) total += weights[k];
        for (int k = 0; k < experts.top_k; k++) weights[k] /= total + (experts.scores == kSigmoid ? 1e-20f : 0.0f);
    }
    for (int k = 0; k < experts.top_k; k++) {
        weights[k] *= experts.scale;
        if (experts.factors != nullptr) weights[k] *= experts.factors[chosen[k]];
    }
}

// The pairs of one expert: rows first .. last - 1.
struct Group {
    int expert, first, last;
};

// A late thread may find the choices of a later layer, which it has no use for, but which may have more experts.
inline void group_pairs(const Experts& experts, const Mixture& mixture, int num_pairs, std::vector<Group>& groups) {
    std::vector<int> starts(experts.count + 1);
    for (int p = 0; p < num_pairs; p++) starts[std::min(mixture.chosen[p], experts.count - 1) + 1]++;
    groups.clear();
    for (int e = 0; e < experts.count; e++) {
        if (starts[e + 1] > 0) groups.push_back({e, starts[e], starts[e] + starts[e + 1]});
        starts[e + 1] += starts[e];
    }
}

// The expert of a row.
inline int expert_of(const std::vector<Group>& groups, int row) {
    const auto ends_later = [](int row, const Group& group) { return row < group.last; };
    return std::upper_bound(groups.begin(), groups.end(), row, ends_later)->expert;
}

// The places of all pairs; one thread writes them for all.
inline void order_pairs(const Experts& experts, const Mixture& mixture, int num_pairs, const std::vector<Group>& groups) {
    std::vector<int> next(experts.count);
    for (const Group& group : groups) next[group.expert] = group.first;
    for (int p = 0; p < num_pairs; p++) mixture.order[p] = next[mixture.chosen[p]]++;
}

// The tasks of the products of all groups with their weights, of panels that stay together with their twins.
struct GroupTask {
    int expert;
    Task task;
};

inline void group_tasks(const std::vector<Group>& groups, const Weight& weight, int num_panels, int num_threads,
                        std::vector<GroupTask>& tasks) {
    constexpr int kTileRows = FloatTile<Float32Panels>::kMaxRows;
    const int rows_fit = std::max<int64_t>(1, kRowsBytes / (int64_t(weight.inputs) * 4 * kTileRows)) * kTileRows;
    const int wanted = (4 * num_threads + int(groups.size()) - 1) / std::max<int>(1, groups.size());
    tasks.clear();
    for (const Group& group : groups) {
        const int count = group.last - group.first, num_blocks = (count + rows_fit - 1) / rows_fit;
        // A part has whole tiles of so many rows, and six panels or more.
        const int unit = panels_for(count, weight.format), num_units = (num_panels + unit - 1) / unit;
        const int num_parts = std::clamp(num_units / ((5 + unit) / unit), std::min(wanted, num_units), std::max(wanted, 16));
        for (int block = 0; block < num_blocks; block++)
            for (int part = 0; part < num_parts; part++)
                tasks.push_back({group.expert,
                                 {group.first + count * block / num_blocks, group.first + count * (block + 1) / num_blocks,
                                  num_units * part / num_parts * unit,
                                  std::min(num_panels, num_units * (part + 1) / num_parts * unit)}});
    }
}

// A token's row, as the inputs of each of its experts. It is encoded only once unless its choices weigh it, experts have
// orders of their own, or scaled floats are multiplied by the row itself.
inline void spread_row(const Experts& experts, const Mixture& mixture, const Rows& inputs, const float* row, int t) {
    const Weight& weight = experts.experts[0].gate_up;
    const int size = weight.inputs;
    const bool is_alike = !experts.weighs_inputs && weight.order == nullptr;
    const bool is_shared = is_encoded(weight) && is_alike && !is_scaled(weight.format);
    const int32_t* places = mixture.order + int64_t(t) * experts.top_k;
    for (int k = 0; k < experts.top_k; k++) {
        const int64_t place = places[k], first = places[0];
        if (k > 0 && is_shared) {
            mixture.codes.copy_row(first, place, size, weight.format);
            continue;
        }
        float* to = mixture.inputs + place * size;
        std::memcpy(to, row, size_t(size) * 4);
        if (experts.weighs_inputs) {
            scale(to, size, mixture.weights[int64_t(t) * experts.top_k + k]);
            round_inputs(to, size, weight.format);
        }
        const int expert = mixture.chosen[int64_t(t) * experts.top_k + k];
        if (is_encoded(weight)) encode_row(inputs, places[k], experts.experts[expert].gate_up, mixture.codes);
    }
}

// Computes the experts of all pairs into `outputs`. Called by all threads of a team; each may pass its own copy of the
// tokens' rows. A pair's result has the same bits whatever other pairs there are.
inline void compute_experts(Team& team, const Experts& experts, const Mixture& mixture, const float* rows, int hidden_size,
                            int num_tokens) {
    const int num_pairs = num_tokens * experts.top_k;
    const Mlp& model = experts.experts[0];
    const int size = model.down.inputs, stride = model.gate_up.outputs;
    thread_local std::vector<Group> groups;
    thread_local std::vector<GroupTask> tasks;
    group_pairs(experts, mixture, num_pairs, groups);
    team.share(1, [&](int) { order_pairs(experts, mixture, num_pairs, groups); });
    const Rows inputs{mixture.inputs, hidden_size, num_pairs};
    team.share(num_tokens, [&](int t) { spread_row(experts, mixture, inputs, rows + int64_t(t) * hidden_size, t); });

    const auto gate = [&](int row, int first, int last) {
        activate(model, mixture.gate_up + int64_t(row) * stride + first, last - first);
    };
    const bool is_split = model.is_gated && size % kPanel != 0;  // the other half starts within a panel
    const int twin = model.is_gated && !is_split ? size / kPanel : 0;
    group_tasks(groups, model.gate_up, twin ? twin : (stride + kPanel - 1) / kPanel, team.size(), tasks);
    team.share(static_cast<int>(tasks.size()), [&](int index) {
        const auto& [expert, task] = tasks[index];
        const Weight& weight = experts.experts[expert].gate_up;
        const Product out{mixture.gate_up, stride, false};
        multiply_parts(weight, inputs, mixture.codes, out, task);
        if (twin) multiply_parts(weight, inputs, mixture.codes, out, {task.first, task.last, task.panel + twin, task.end + twin});
        if (is_split) return;
        for (int r = task.first; r < task.last; r++) gate(r, task.panel * kPanel, std::min(task.end * kPanel, size));
    });
    if (is_split) team.share(num_pairs, [&](int r) { gate(r, 0, size); });

    const Rows gated{mixture.gate_up, stride, num_pairs};
    if (is_encoded(model.down))
        team.share(num_pairs, [&](int r) {
            encode_row(gated, r, experts.experts[expert_of(groups, r)].down, mixture.codes);
        });
    group_tasks(groups, model.down, (hidden_size + kPanel - 1) / kPanel, team.size(), tasks);
    team.share(static_cast<int>(tasks.size()), [&](int index) {
        const auto& [expert, task] = tasks[index];
        multiply_parts(experts.experts[expert].down, gated, mixture.codes, {mixture.outputs, hidden_size, false}, task);
    });
}

// The sum of a token's experts in the order of their choice. `to` may be the outputs of one of the experts.
inline void sum_of_experts(const Experts& experts, const Mixture& mixture, int t, int size, float* to) {
    for (int d = 0; d < size; d += kLanes) {
        Floats total{};
        for (int k = 0; k < experts.top_k; k++) {
            const int64_t pair = int64_t(t) * experts.top_k + k;
            const Floats output = load_first(mixture.outputs + int64_t(mixture.order[pair]) * size + d, size - d);
            total = total + (experts.weighs_inputs ? output : output * mixture.weights[pair]);
        }
        store_first(to + d, total, size - d);
    }
}

// The result of a token: its experts in the order of their choice, then the shared expert, whose output `to` holds.
inline void combine(const Experts& experts, const Mixture& mixture, int t, int hidden_size, float* to) {
    const bool is_gated = experts.shared != nullptr && experts.shared_gate.panels != nullptr;
    const float factor = is_gated ? sigmoid(mixture.shared_gates[t]) : 1.0f;
    if (experts.shared == nullptr && experts.norms == nullptr) return sum_of_experts(experts, mixture, t, hidden_size, to);
    float* sum = mixture.outputs + int64_t(mixture.order[int64_t(t) * experts.top_k]) * hidden_size;
    sum_of_experts(experts, mixture, t, hidden_size, sum);
    if (experts.norms != nullptr) normalize(experts.norms->after, sum, hidden_size, sum);
    if (experts.shared == nullptr) return void(std::memcpy(to, sum, size_t(hidden_size) * 4));
    if (experts.norms != nullptr) {
        for (int d = 0; d < hidden_size; d++) to[d] *= factor;
        normalize(experts.norms->after_shared, to, hidden_size, to);
        for (int d = 0; d < hidden_size; d++) to[d] += sum[d];
        return;
    }
    for (int d = 0; d < hidden_size; d++) to[d] = sum[d] + to[d] * factor;
}

}  // namespace warren

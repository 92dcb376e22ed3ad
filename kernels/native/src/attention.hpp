// Causal attention of packed queries over a paged KV cache, with an online softmax (Milakov and Gimelshein,
// arXiv:1805.02867; Dao et al., arXiv:2205.14135).
//
// Keys are processed in spans of 32 that start at multiples of 32, transposed so that vector lanes run over tokens.
// Each query's sums have a fixed order, whatever other queries use the same keys: its result depends only on its own
// context, neither on the batch nor on how a prompt was chunked.
#pragma once

#include <array>
#include <limits>
#include <vector>

#include "cache.hpp"
#include "packed.hpp"
#include "threads.hpp"

namespace warren {

// The inputs of all sequences of a step: see worker.model.forward.ForwardInputs.
struct Batch {
    const int32_t* block_tables;  // [num_seqs, max_num_blocks]
    const int32_t* query_starts;  // [num_seqs + 1]
    const int32_t* context_lens;  // [num_seqs]
    int32_t num_seqs;
    int32_t max_num_blocks;
};

// Which tokens a token attends to, and how scores follow from products: see kernels/attention_spec.py.
struct Rule {
    const float* sinks;   // [num_heads] or null
    const float* slopes;  // [num_heads] or null: a score falls by so much for each token of distance
    float scale;
    float softcap;   // 0: none
    int32_t window;  // number of tokens that a token attends to, including itself; 0: all
    int32_t chunk;   // tokens in a chunk; 0: there are no chunks
};

struct Heads {
    const float* query;  // [num_tokens, num_heads, head_dim], with `stride` floats from one token to the next
    int64_t stride;
    float* out;  // [num_tokens, num_heads, head_dim]
    int32_t num_heads;
    Rule rule;
    int32_t format;  // of the weights that `out` is multiplied with: see `round_inputs`
};

constexpr int kTileTokens = 32;  // tokens of a prompt that process the keys together
constexpr int kTileHeads = 16;   // query heads that process the keys of one head together
constexpr int kRowsAtOnce = kLanes == 16 ? 6 : 3;  // their sums fill the registers

// The state of one query while it processes its keys.
struct Running {
    const float* query;
    float* out;  // not yet divided by `total`
    int first;   // tokens first .. last - 1 are visible
    int last;
    float slope = 0;
    float most = std::numeric_limits<float>::lowest();  // finite, so that no visible tokens give no NaN
    Floats total[kVectors] = {};
};

template <int kRows>
struct Weights {
    float decay[kRows];
    alignas(64) float of[kRows][kSpan];  // scores, then weights that are not yet divided by their total
};

constexpr auto kPlaces = [] {
    std::array<float, kSpan> places{};
    for (int i = 0; i < kSpan; i++) places[i] = i;
    return places;
}();

// The biases of attention with linear biases (Press et al., arXiv:2108.12409), added to the scores of the tokens from `begin`
// on. A distance is a whole number, so that only the product and the sum are rounded, and together.
inline void add_biases(const Running& row, int begin, float* scores) {
    const Floats slope = broadcast(row.slope), first = broadcast(begin - (row.last - 1));
    for (int i = 0; i < kSpan; i += kLanes) {
        const Floats distance = load(kPlaces.data() + i) + first;  // at most 0 for visible tokens
        store(scores + i, multiply_add(slope, distance, load(scores + i)));
    }
}

// Products of queries and keys; the keys of the tokens from `begin` on are [head_dim, kSpan].
template <int kRows>
inline void score(const Running* rows, const float* keys, int begin, int head_dim, const Rule& rule, Weights<kRows>& to) {
    Floats sums[kRows][kSpanVectors] = {};
    for (int d = 0; d < head_dim; d++) {
        Floats query[kRows];
        for (int r = 0; r < kRows; r++) query[r] = broadcast(rows[r].query[d]);
        for (int v = 0; v < kSpanVectors; v++) {
            const Floats key = load(keys + d * kSpan + v * kLanes);
            for (int r = 0; r < kRows; r++) sums[r][v] = multiply_add(query[r], key, sums[r][v]);
        }
    }
    for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kSpanVectors; v++) {
            const Floats score = sums[r][v] * rule.scale;
            store(to.of[r] + v * kLanes, rule.softcap > 0 ? soft_capped(score, rule.softcap) : score);
        }
    if (rule.slopes != nullptr)
        for (int r = 0; r < kRows; r++) add_biases(rows[r], begin, to.of[r]);
}

// Sets the entries of tokens that the row does not attend to.
inline void hide(const Running& row, int begin, float* weights, float weight) {
    const int first = std::clamp(row.first - begin, 0, kSpan), last = std::clamp(row.last - begin, 0, kSpan);
    if (first > 0) std::fill(weights, weights + first, weight);
    if (last < kSpan) std::fill(weights + last, weights + kSpan, weight);
}

// Converts scores to weights.
template <int kRows>
inline void weigh(Running* rows, int begin, Weights<kRows>& weights) {
    float most[kRows];
    for (int r = 0; r < kRows; r++) {
        hide(rows[r], begin, weights.of[r], -std::numeric_limits<float>::infinity());
        Floats highest = load(weights.of[r]);
        for (int i = kLanes; i < kSpan; i += kLanes) highest = maximum(highest, load(weights.of[r] + i));
        most[r] = std::max(rows[r].most, largest(highest));
    }
    for (int r = 0; r < kRows; r++) {
        for (int i = 0; i < kSpan; i += kLanes) store(weights.of[r] + i, exponential(load(weights.of[r] + i) - most[r]));
        hide(rows[r], begin, weights.of[r], 0);
    }
    for (int r = 0; r < kRows; r++) {
        weights.decay[r] = most[r] == rows[r].most ? 1 : exponential(broadcast(rows[r].most - most[r]))[0];
        rows[r].most = most[r];
        for (int v = 0; v < kVectors; v++) {
            Floats total = rows[r].total[v] * weights.decay[r];
            for (int i = v * kLanes; i < kSpan; i += kPanel) total += load(weights.of[r] + i);
            rows[r].total[v] = total;
        }
    }
}

// A span of keys, [head_dim, kSpan], and of values; only tokens begin + low .. begin + high - 1 are valid.
template <class Element>
struct Visit {
    const float* keys;
    const Element* const* values;
    const Span<Element>* next;  // prefetched meanwhile, if any
    int begin, low, high, head_dim;
    const Rule& rule;
};

template <int kRows, int kCount, class Element>
inline void add_values(const Running* rows, const Visit<Element>& visit, int low, int high, int d,
                       const Weights<kRows>& weights) {
    Floats out[kRows][kCount];
    for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kCount; v++) out[r][v] = load(rows[r].out + d + v * kLanes) * weights.decay[r];
    for (int i = low; i < high; i++) {
        if (d == 0 && visit.next) visit.next->prefetch(visit.next->values, i, visit.head_dim);
        Floats weight[kRows];
        for (int r = 0; r < kRows; r++) weight[r] = broadcast(weights.of[r][i]);
        for (int v = 0; v < kCount; v++) {
            const Floats element = load_element(visit.values[i] + d + v * kLanes);
            for (int r = 0; r < kRows; r++) out[r][v] = multiply_add(weight[r], element, out[r][v]);
        }
    }
    for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kCount; v++) store(rows[r].out + d + v * kLanes, out[r][v]);
}

// Rows are in the order of their tokens.
template <int kRows, class Element>
inline void attend_rows(Running* rows, const Visit<Element>& visit) {
    const int low = std::max(visit.low, rows[0].first - visit.begin);
    const int high = std::min(visit.high, rows[kRows - 1].last - visit.begin);
    if (low >= high) return;
    const int head_dim = visit.head_dim;
    Weights<kRows> weights;
    score(rows, visit.keys, visit.begin, head_dim, visit.rule, weights);
    weigh(rows, visit.begin, weights);
    int d = 0;
    for (; d + 32 <= head_dim; d += 32) add_values<kRows, 32 / kLanes>(rows, visit, low, high, d, weights);
    for (; d < head_dim; d += 16) add_values<kRows, kVectors>(rows, visit, low, high, d, weights);
}

// Whether a row does not attend to tokens of the span to which another one does, and which have a value that is no
// finite number. Its weights for them are zero, and a product of zero with such a value is NaN.
template <class Element>
inline bool is_poisoned(const Running& front, const Running& back, const Visit<Element>& visit) {
    const auto is_poisoned_between = [&](int low, int high) {
        Floats poison = {};
        for (int i = std::max(low, visit.low); i < std::min(high, visit.high); i++)
            for (int d = 0; d < visit.head_dim; d += kLanes) poison += load_element(visit.values[i] + d) * 0.0f;
        float total = 0;
        for (int i = 0; i < kLanes; i++) total += poison[i];
        return total != 0;
    };
    return is_poisoned_between(front.first - visit.begin, back.first - visit.begin) ||
           is_poisoned_between(front.last - visit.begin, back.last - visit.begin);
}

template <int kRows = kRowsAtOnce, class Element>
inline void attend_groups(Running* row, Running* end, const Visit<Element>& visit) {
    for (; end - row >= kRows; row += kRows) attend_rows<kRows>(row, visit);
    if constexpr (kRows > 1) attend_groups<(kRows > 3 ? 3 : kRows - 1)>(row, end, visit);
}

template <class Element>
inline void attend_span(Running* row, Running* end, const Visit<Element>& visit) {
    if (is_poisoned(*row, *(end - 1), visit))
        attend_groups<1>(row, end, visit);
    else
        attend_groups(row, end, visit);
}

// Query heads first .. end - 1, which share one key head.
struct HeadRange {
    int kv_head, first, end;
};

// Tokens `from` .. `to` - 1 of one sequence's share of the step.
inline std::vector<Running>& find_rows(const Cache& cache, const Batch& batch, const Heads& heads, int seq, int from, int to,
                                       const HeadRange& range) {
    thread_local std::vector<Running> rows;
    const int start = batch.query_starts[seq];
    const int position = batch.context_lens[seq] - (batch.query_starts[seq + 1] - start);  // of the share's first token
    rows.clear();
    for (int token = from; token < to; token++) {
        for (int h = range.first; h < range.end; h++) {
            Running& row = rows.emplace_back();
            row.query = heads.query + (start + token) * heads.stride + h * cache.head_dim;
            row.out = heads.out + (int64_t(start + token) * heads.num_heads + h) * cache.head_dim;
            std::fill(row.out, row.out + cache.head_dim, 0.0f);
            row.last = position + token + 1;
            row.first = heads.rule.window > 0 ? std::max(0, row.last - heads.rule.window) : 0;
            if (heads.rule.chunk > 0) row.first = std::max(row.first, (row.last - 1) / heads.rule.chunk * heads.rule.chunk);
            if (heads.rule.slopes != nullptr) row.slope = heads.rule.slopes[h];
            if (heads.rule.sinks != nullptr) {  // as if a token with this score and no value had been seen
                row.most = heads.rule.sinks[h];
                row.total[0][0] = 1;
            }
        }
    }
    return rows;
}

struct AttentionTask {
    int seq, from, to;
};

template <class Element>
inline void attend_tile(const Cache& cache, const Batch& batch, const Heads& heads, const AttentionTask& task,
                        const HeadRange& range) {
    alignas(64) thread_local float keys[kMaxHeadDim * kSpan], values[kSpan * kMaxHeadDim];
    const int seq = task.seq, kv_head = range.kv_head;
    std::vector<Running>& rows = find_rows(cache, batch, heads, seq, task.from, task.to, range);
    Running *row = rows.data(), *end = row + rows.size();
    const int32_t* table = batch.block_tables + int64_t(seq) * batch.max_num_blocks;
    const int first = rows.front().first, last = rows.back().last, head_dim = cache.head_dim;
    const float* unpacked[kSpan];
    for (int i = 0; i < kSpan; i++) unpacked[i] = values + i * head_dim;
    Span<Element> spans[2], *span = &spans[0], *next = &spans[1];
    next->find(cache, table, kv_head, first / kSpan * kSpan, first, last);
    for (int begin = first / kSpan * kSpan; begin < last; begin += kSpan) {
        std::swap(span, next);
        next->find(cache, table, kv_head, begin + kSpan, first, last);
        transpose_keys(*span, *next, head_dim, keys);
        const int low = span->low, high = span->high;
        if (rows.size() > kRowsAtOnce) {  // the keys are read more than once
            unpack_values(*span, *next, head_dim, values);
            attend_span(row, end, Visit<float>{keys, unpacked, nullptr, begin, low, high, head_dim, heads.rule});
        } else {
            attend_span(row, end, Visit<Element>{keys, span->values, next, begin, low, high, head_dim, heads.rule});
        }
    }
    for (Running& row : rows) {
        const float total = sum(row.total);
        for (int d = 0; d < head_dim; d++) row.out[d] /= total;
        round_inputs(row.out, head_dim, heads.format);
    }
}

// All pieces of a batch, longest first, because a long piece that starts last would delay the end.
inline std::vector<AttentionTask> attention_tasks(const Batch& batch) {
    std::vector<AttentionTask> tasks;
    for (int seq = 0; seq < batch.num_seqs; seq++) {
        const int count = batch.query_starts[seq + 1] - batch.query_starts[seq];
        for (int from = 0; from < count; from += kTileTokens)
            tasks.push_back({seq, from, std::min(from + kTileTokens, count)});
    }
    const auto cost = [&](const AttentionTask& task) {
        const int count = batch.query_starts[task.seq + 1] - batch.query_starts[task.seq];
        return int64_t(task.to - task.from + 1) * (batch.context_lens[task.seq] - count + task.to);
    };
    std::stable_sort(tasks.begin(), tasks.end(), [&](const auto& a, const auto& b) { return cost(a) > cost(b); });
    return tasks;
}

// Called by all threads of a team, with the same tasks.
inline void attention(Team& team, const Cache& cache, const Batch& batch, const Heads& heads,
                      const std::vector<AttentionTask>& tasks) {
    const int group = heads.num_heads / cache.num_kv_heads, parts = (group + kTileHeads - 1) / kTileHeads;
    const int num_ranges = cache.num_kv_heads * parts;
    team.share(static_cast<int>(tasks.size()) * num_ranges, [&](int index) {
        const AttentionTask& task = tasks[index / num_ranges];
        const int kv_head = index % num_ranges / parts, part = index % num_ranges % parts;
        const HeadRange range{kv_head, kv_head * group + group * part / parts, kv_head * group + group * (part + 1) / parts};
        if (cache.type == kCacheFloat32)
            attend_tile<float>(cache, batch, heads, task, range);
        else if (cache.type == kCacheBfloat16)
            attend_tile<uint16_t>(cache, batch, heads, task, range);
        else
            attend_tile<Float8>(cache, batch, heads, task, range);
    });
}

}  // namespace warren

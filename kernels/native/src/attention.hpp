// Causal attention of packed queries over keys and values that lie in blocks (Kwon et al., arXiv:2309.06180), with the
// softmax computed on the way (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135).
//
// Keys are visited in spans of 32 that begin at multiples of 32, and each query goes through them alone: its result
// depends on its own context, neither on the batch nor on how a prompt was cut into chunks.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "threads.hpp"
#include "vector.hpp"

namespace warren {

enum CacheType : int32_t { kCacheFloat32 = 0, kCacheBfloat16 = 1 };

struct Cache {
    uint8_t* keys;  // [num_blocks, block_size, num_kv_heads, head_dim], and values alike
    uint8_t* values;
    int32_t type;
    int32_t block_size;  // divides 32
    int32_t num_kv_heads;
    int32_t head_dim;  // a multiple of 16

    int64_t element_bytes() const { return type == kCacheFloat32 ? 4 : 2; }
    int64_t slot_bytes() const { return element_bytes() * num_kv_heads * head_dim; }
};

// What every sequence of a step has: see worker.model.interface.ForwardInputs.
struct Batch {
    const int32_t* block_tables;  // [num_seqs, max_num_blocks]
    const int32_t* query_starts;  // [num_seqs + 1]
    const int32_t* context_lens;  // [num_seqs]
    int32_t num_seqs;
    int32_t max_num_blocks;
};

struct Heads {
    const float* query;  // [num_tokens, num_heads, head_dim], a token every `stride` floats
    int64_t stride;
    float* out;  // [num_tokens, num_heads, head_dim]
    int32_t num_heads;
    float scale;
    int32_t window;  // tokens that one sees, itself included; 0: all
};

constexpr int kSpan = 32;
constexpr int kTileTokens = 16;  // tokens of a prompt that go through the keys together
constexpr int kMaxHeadDim = 256;
constexpr int kUnpackTileRows = 8;  // from so many rows on it pays to turn keys and values into floats once

inline Floats load_element(const float* from) { return load(from); }
inline Floats load_element(const uint16_t* from) { return from_bf16(from); }

// One span of keys or values of a head. While it is read the next one is asked for, row by row: rows of other heads lie
// between, which no hardware prefetcher makes out, and all at once they would find no room on their way.
template <class Element>
struct Span {
    const Element* rows[kSpan];
    const Element* next[kSpan];
    int next_low = 0, next_high = 0;

    // Tokens begin + low .. begin + high - 1; no others are touched: they may hold NaN.
    void find(const Cache& cache, const uint8_t* layer, const int32_t* table, int kv_head, int begin, int low, int high) {
        for (int i = low; i < high; i++) {
            const int token = begin + i;
            const int64_t slot = int64_t(table[token / cache.block_size]) * cache.block_size + token % cache.block_size;
            next[i] = reinterpret_cast<const Element*>(layer + slot * cache.slot_bytes()) + kv_head * cache.head_dim;
        }
        next_low = low;
        next_high = high;
    }

    void advance() { std::swap(rows, next); }

    void prefetch(int i, int head_dim) const {
        if (i < next_low || i >= next_high) return;
        for (int d = 0; d < head_dim; d += 64 / int(sizeof(Element))) __builtin_prefetch(next[i] + d);
    }
};

// A span copied as floats.
struct UnpackedSpan : Span<float> {
    alignas(64) float floats[kSpan * kMaxHeadDim];

    template <class Element>
    void copy(const Span<Element>& from, int head_dim, int low, int high) {
        for (int i = low; i < high; i++) {
            float* to = floats + i * head_dim;
            for (int d = 0; d < head_dim; d += kLanes) store(to + d, load_element(from.rows[i] + d));
            rows[i] = to;
        }
    }
};

// One query's way through its keys.
struct Running {
    const float* query;
    float* out;  // not yet divided by `total`
    int first;   // tokens first .. last - 1 are visible
    int last;
    float most;
    float total;
    float decay;
    alignas(64) float weights[kSpan + 3];  // scores come in fours
};

// Products with keys low .. high - 1, four at a time.
template <class Element, int kRows>
inline void score_span(Running* rows, const Span<Element>& keys, int low, int high, int head_dim, float scale) {
    for (int i = low; i < high; i += 4) {
        const Element* key[4];
        for (int j = 0; j < 4; j++) {
            const int token = std::min(i + j, high - 1);
            key[j] = keys.rows[token];
            keys.prefetch(token, head_dim);
        }
        Floats products[kRows][4] = {};
        for (int d = 0; d < head_dim; d += kLanes) {
            Floats query[kRows];
            for (int r = 0; r < kRows; r++) query[r] = load(rows[r].query + d);
            for (int j = 0; j < 4; j++) {
                const Floats element = load_element(key[j] + d);
                for (int r = 0; r < kRows; r++) products[r][j] = multiply_add(query[r], element, products[r][j]);
            }
        }
        for (int r = 0; r < kRows; r++) store(rows[r].weights + i, sums(products[r]) * scale);
    }
}

// From scores to weights that are not yet divided by their total; what the row does not see weighs nothing.
inline void weigh_span(Running& row, int begin) {
    const int first = std::max(row.first - begin, 0), last = std::min(row.last - begin, kSpan);
    row.decay = 1;
    if (first >= last) {
        std::fill(row.weights, row.weights + kSpan, 0.0f);
        return;
    }
    const float nothing = -std::numeric_limits<float>::infinity();
    for (int i = 0; i < first; i++) row.weights[i] = nothing;
    for (int i = last; i < kSpan; i++) row.weights[i] = nothing;
    Floats highest = load(row.weights);
    for (int i = kLanes; i < kSpan; i += kLanes) highest = maximum(highest, load(row.weights + i));
    const float most = std::max(row.most, largest(highest));
    for (int i = 0; i < kSpan; i += kLanes) store(row.weights + i, exponential(load(row.weights + i) - most));
    for (int i = 0; i < first; i++) row.weights[i] = 0;
    for (int i = last; i < kSpan; i++) row.weights[i] = 0;
    Floats total = {};
    for (int i = 0; i < kSpan; i += kLanes) total += load(row.weights + i);
    row.decay = exponential(broadcast(row.most - most))[0];
    row.most = most;
    row.total = row.total * row.decay + sum(total);
}

template <class Element, int kRows, int kCount>
inline void add_values(Running* rows, const Span<Element>& values, int low, int high, int d, int head_dim) {
    Floats out[kRows][kCount];
    for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kCount; v++) out[r][v] = load(rows[r].out + d + v * kLanes) * rows[r].decay;
    for (int i = low; i < high; i++) {
        if (d == 0) values.prefetch(i, head_dim);
        Floats weight[kRows];
        for (int r = 0; r < kRows; r++) weight[r] = broadcast(rows[r].weights[i]);
        for (int v = 0; v < kCount; v++) {
            const Floats element = load_element(values.rows[i] + d + v * kLanes);
            for (int r = 0; r < kRows; r++) out[r][v] = multiply_add(weight[r], element, out[r][v]);
        }
    }
    for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kCount; v++) store(rows[r].out + d + v * kLanes, out[r][v]);
}

template <class Element, int kRows>
inline void attend_rows(Running* rows, const Span<Element>& keys, const Span<Element>& values, int begin, int low, int high,
                        int head_dim, float scale) {
    if (rows[kRows - 1].last <= begin) return;  // none of these rows, in the order of their tokens, has come so far
    high = std::min(high, rows[kRows - 1].last - begin);
    score_span<Element, kRows>(rows, keys, low, high, head_dim, scale);
    for (int r = 0; r < kRows; r++) weigh_span(rows[r], begin);
    int d = 0;
    for (; d + 32 <= head_dim; d += 32) add_values<Element, kRows, 32 / kLanes>(rows, values, low, high, d, head_dim);
    for (; d < head_dim; d += 16) add_values<Element, kRows, kVectors>(rows, values, low, high, d, head_dim);
}

template <class Element>
inline void attend_span(std::vector<Running>& rows, const Span<Element>& keys, const Span<Element>& values, int begin,
                        int low, int high, int head_dim, float scale) {
    size_t r = 0;
    for (; r + 3 <= rows.size(); r += 3)
        attend_rows<Element, 3>(&rows[r], keys, values, begin, low, high, head_dim, scale);
    if (r + 2 == rows.size()) attend_rows<Element, 2>(&rows[r], keys, values, begin, low, high, head_dim, scale);
    if (r + 1 == rows.size()) attend_rows<Element, 1>(&rows[r], keys, values, begin, low, high, head_dim, scale);
}

// Tokens `from` .. `to` - 1 of one sequence's share of the step, for the query heads that share one key head.
template <class Element>
inline void attend_tile(const Cache& cache, const Batch& batch, const Heads& heads, int seq, int from, int to, int kv_head) {
    thread_local std::vector<Running> rows;
    thread_local UnpackedSpan unpacked_keys, unpacked_values;
    const int group = heads.num_heads / cache.num_kv_heads;
    const int start = batch.query_starts[seq];
    const int position = batch.context_lens[seq] - (batch.query_starts[seq + 1] - start);  // of the share's first token
    rows.clear();
    for (int token = from; token < to; token++) {
        for (int h = kv_head * group; h < (kv_head + 1) * group; h++) {
            Running& row = rows.emplace_back();
            row.query = heads.query + (start + token) * heads.stride + h * cache.head_dim;
            row.out = heads.out + (int64_t(start + token) * heads.num_heads + h) * cache.head_dim;
            std::fill(row.out, row.out + cache.head_dim, 0.0f);
            row.last = position + token + 1;
            row.first = heads.window > 0 ? std::max(0, row.last - heads.window) : 0;
            row.most = -std::numeric_limits<float>::infinity();
            row.total = 0;
        }
    }
    const int32_t* table = batch.block_tables + int64_t(seq) * batch.max_num_blocks;
    const int first = rows.front().first, last = rows.back().last, head_dim = cache.head_dim;
    Span<Element> keys, values;
    const auto find = [&](int begin) {
        const int low = std::max(first - begin, 0), high = std::min(last - begin, kSpan);
        keys.find(cache, cache.keys, table, kv_head, begin, low, high);
        values.find(cache, cache.values, table, kv_head, begin, low, high);
    };
    find(first / kSpan * kSpan);
    for (int begin = first / kSpan * kSpan; begin < last; begin += kSpan) {
        const int low = std::max(first - begin, 0), high = std::min(last - begin, kSpan);
        keys.advance();
        values.advance();
        find(begin + kSpan);
        if (rows.size() < kUnpackTileRows) {
            attend_span(rows, keys, values, begin, low, high, head_dim, heads.scale);
        } else {
            unpacked_keys.copy(keys, head_dim, low, high);
            unpacked_values.copy(values, head_dim, low, high);
            attend_span<float>(rows, unpacked_keys, unpacked_values, begin, low, high, head_dim, heads.scale);
        }
    }
    for (Running& row : rows)
        for (int d = 0; d < head_dim; d++) row.out[d] /= row.total;
}

struct AttentionTask {
    int seq, from, to;
};

// All pieces of a batch, the longest first: a long one that begins last would be waited for.
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
    team.share(static_cast<int>(tasks.size()) * cache.num_kv_heads, [&](int index) {
        const AttentionTask& task = tasks[index / cache.num_kv_heads];
        const int kv_head = index % cache.num_kv_heads;
        if (cache.type == kCacheFloat32)
            attend_tile<float>(cache, batch, heads, task.seq, task.from, task.to, kv_head);
        else
            attend_tile<uint16_t>(cache, batch, heads, task.seq, task.from, task.to, kv_head);
    });
}

}  // namespace warren

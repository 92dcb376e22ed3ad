// Filtering and drawing of tokens. A row's result depends only on the row itself.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "threads.hpp"
#include "vector.hpp"

namespace warren {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kNoToken = -1;  // of a row with NaN or infinity, or without a finite number

struct Logits {
    const float* at;
    int32_t size;
};

// The maximum of kPanel numbers; -infinity if all are NaN.
inline float highest_of(const float* from) {
    Floats most = broadcast(-kInfinity);
    for (int i = 0; i < kPanel; i += kLanes) most = maximum(load(from + i), most);
    return largest(most);
}

// The maximum; NaN if a value is NaN.
inline float greatest(const Logits& row) {
    Floats most = broadcast(-kInfinity);
    Ints is_nan = {};
    int i = 0;
    for (; i + kLanes <= row.size; i += kLanes) {
        const Floats values = load(row.at + i);
        most = maximum(values, most);
        is_nan |= values != values;
    }
    float result = largest(most);
    for (int lane = 0; lane < kLanes; lane++)
        if (is_nan[lane]) return kNaN;
    for (; i < row.size; i++) {
        if (std::isnan(row.at[i])) return kNaN;
        result = std::max(result, row.at[i]);
    }
    return result;
}

// The probability of tokens relative to the most likely one; 0 below e^-87.
struct Softmax {
    float most, temperature;

    Floats weights(Floats logits) const {
        const Floats scaled = (logits - most) / temperature;
        return scaled > -87.0f ? exponential(scaled) : Floats{};
    }

    float weight(float logit) const { return weights(broadcast(logit))[0]; }

    double mass(const float* logits, int64_t count, float floor = -kInfinity) const {
        double total = 0;
        int64_t i = 0;
        for (; i + kPanel <= count; i += kPanel) {
            if (floor > -kInfinity && highest_of(logits + i) < floor) continue;
            Floats kept[kVectors];
            for (int v = 0; v < kVectors; v++) {
                const Floats values = load(logits + i + v * kLanes);
                kept[v] = values >= floor ? weights(values) : Floats{};
            }
            total += sum(kept);
        }
        for (; i < count; i++) total += logits[i] >= floor ? weight(logits[i]) : 0.0f;
        return total;
    }
};

struct Filters {
    int64_t top_k;  // 0: all
    float top_p;    // 1: all
    float min_p;    // 0: all
};

// Copies the numbers of a row that are at least `least` to `room`; returns how many.
inline int64_t gather(const Logits& row, float least, float* room) {
    int64_t count = 0;
    const auto take = [&](int i) {
        room[count] = row.at[i];
        count += row.at[i] >= least;
    };
    int i = 0;
    for (; i + kPanel <= row.size; i += kPanel)
        if (highest_of(row.at + i) >= least)
            for (int j = 0; j < kPanel; j++) take(i + j);
    for (; i < row.size; i++) take(i);
    return count;
}

// The lowest of the `limit` highest numbers, which are moved to the front.
inline float least_of_count(float* first, int64_t count, int64_t limit) {
    if (count <= limit) return *std::min_element(first, first + count);
    std::nth_element(first, first + limit - 1, first + count, std::greater<float>());
    return first[limit - 1];
}

// The lowest of the highest numbers whose total mass reaches `target`: quickselect by mass instead of count.
inline float least_of_mass(float* first, float* last, const Softmax& softmax, double target) {
    float least = softmax.most;
    while (first < last) {
        const float pivot = least = first[(last - first) / 2];
        float* const equal = std::partition(first, last, [&](float value) { return value > pivot; });
        float* const smaller = std::partition(equal, last, [&](float value) { return value == pivot; });
        const double above = softmax.mass(first, equal - first);
        const double with = above + softmax.weight(pivot) * double(smaller - equal);
        if (equal > first && above >= target) {
            last = equal;
        } else if (with >= target) {
            return pivot;
        } else {
            target -= with;
            first = smaller;
        }
    }
    return least;
}

// The lowest number that is at least `share` times as likely as the highest.
inline float least_of_share(const float* first, int64_t count, const Softmax& softmax, float share) {
    float least = softmax.most;
    for (int64_t i = 0; i < count; i++)
        if (first[i] < least && softmax.weight(first[i]) >= share) least = first[i];
    return least;
}

// The distances from the most likely token within which a floor is looked for in turn: small ones first, because a flat
// distribution has thousands of tokens within 8.
inline float first_distance(float temperature) { return 2 * std::max(temperature, 1.0f); }
inline float next_distance(float distance) { return distance < 64 ? 2 * distance : kInfinity; }

// The lowest of the `top_k` highest logits, and of those the lowest of the highest that have `top_p` of their mass.
inline float top_k_floor(const Logits& row, const Softmax& softmax, int64_t top_k, float top_p, float* room) {
    for (float distance = first_distance(softmax.temperature);; distance = next_distance(distance)) {
        const int64_t count = gather(row, softmax.most - distance, room);
        if (count < top_k && distance < kInfinity) continue;
        const float floor = least_of_count(room, count, top_k);
        if (top_p >= 1) return floor;
        const int64_t kept = std::min(count, top_k);
        return std::max(floor, least_of_mass(room, room + kept, softmax, top_p * softmax.mass(room, kept)));
    }
}

// The lowest of the highest logits that have `top_p` of the row's mass.
inline float top_p_floor(const Logits& row, const Softmax& softmax, float top_p, float* room) {
    const double target = top_p * softmax.mass(row.at, row.size);
    for (float distance = first_distance(softmax.temperature);; distance = next_distance(distance)) {
        const int64_t count = gather(row, softmax.most - distance, room);
        if (softmax.mass(room, count) < target && distance < kInfinity) continue;
        return least_of_mass(room, room + count, softmax, target);
    }
}

// The lowest logit of a token that is at least `min_p` times as likely as the most likely one.
inline float min_p_floor(const Logits& row, const Softmax& softmax, float min_p, float* room) {
    constexpr float kMargin = 0.001f;  // for rounding
    const float distance = softmax.temperature * (kMargin - std::log(min_p));
    return least_of_share(room, gather(row, softmax.most - distance, room), softmax, min_p);
}

// The lowest logit that passes all filters. `room` holds one float more than the row.
inline float filter_floor(const Logits& row, float temperature, const Filters& filters, float* room) {
    const Softmax softmax{greatest(row), temperature};
    // A temperature of 1e-40 is zero here as well, and `draw` draws the most likely token.
    if (!std::isfinite(softmax.most) || temperature == 0) return softmax.most;
    float floor = -kInfinity;
    if (filters.top_k > 0 && filters.top_k < row.size)
        floor = top_k_floor(row, softmax, filters.top_k, filters.top_p, room);
    else if (filters.top_p < 1)
        floor = top_p_floor(row, softmax, filters.top_p, room);
    if (filters.min_p > 0) floor = std::max(floor, min_p_floor(row, softmax, filters.min_p, room));
    return floor;
}

// The first token of the row whose logit is `most`, the row's maximum; kNoToken if that is no finite number.
inline int64_t token_of(const Logits& row, float most) {
    return std::isfinite(most) ? std::find(row.at, row.at + row.size, most) - row.at : kNoToken;
}

inline int64_t most_likely(const Logits& row) { return token_of(row, greatest(row)); }

// Sets the numbers without a bit in `words` to -infinity; bit i % 32 of word i / 32 belongs to number i.
inline void mask(float* row, int size, const uint32_t* words) {
    for (int first = 0; first < size; first += 32) {
        const uint32_t word = words[first / 32];
        if (word == 0xffffffffu) continue;
        for (int i = 0; i < std::min(32, size - first); i++)
            row[first + i] = word >> i & 1 ? row[first + i] : -kInfinity;
    }
}

// The sum of a row's exponentials, as a logarithm, and its highest numbers with their tokens: the highest first, and of
// equal ones the lower token. The sum of a row with NaN or infinity, or without a finite number, is NaN.
inline void rank(const Logits& row, int depth, float& total, float* values, int64_t* tokens) {
    const float most = greatest(row);
    total = std::isfinite(most) ? static_cast<float>(most + std::log(Softmax{most, 1}.mass(row.at, row.size))) : kNaN;
    std::fill(values, values + depth, -kInfinity);
    std::fill(tokens, tokens + depth, 0);
    int count = 0;
    const auto insert = [&](int token) {
        const float value = row.at[token];
        if (std::isnan(value) || (count == depth && value <= values[depth - 1])) return;
        int place = count < depth ? count++ : depth - 1;
        for (; place > 0 && values[place - 1] < value; place--) {
            values[place] = values[place - 1];
            tokens[place] = tokens[place - 1];
        }
        values[place] = value;
        tokens[place] = token;
    };
    if (depth == 0) return;
    for (int first = 0; first < row.size; first += kPanel) {
        const int last = std::min(first + kPanel, row.size);
        if (count == depth && last - first == kPanel && highest_of(row.at + first) <= values[depth - 1]) continue;
        for (int token = first; token < last; token++) insert(token);
    }
}

// The token at `uniform` of the cumulative distribution; the most likely one at a temperature of 0. kNoToken as in
// `token_of`.
inline int64_t draw(const Logits& row, float temperature, float floor, float uniform) {
    constexpr int kStride = 1024;
    const float most = greatest(row);
    const int64_t best = token_of(row, most);
    if (temperature == 0 || !std::isfinite(most)) return best;
    const Softmax softmax{most, temperature};
    const auto piece = [&](int first) { return std::min(kStride, row.size - first); };
    std::vector<double> masses;
    double total = 0;
    for (int first = 0; first < row.size; first += kStride) {
        masses.push_back(softmax.mass(row.at + first, piece(first), floor));
        total += masses.back();
    }
    const double target = uniform * total;
    double before = 0;
    int64_t drawn = best;
    for (int first = 0; first < row.size; first += kStride) {
        const double mass = masses[first / kStride];
        if (before + mass <= target) {
            before += mass;
            continue;
        }
        for (int i = first; i < first + piece(first); i++) {
            const float weight = row.at[i] >= floor ? softmax.weight(row.at[i]) : 0.0f;
            if (weight == 0) continue;
            drawn = i;  // also if rounding ends the piece before its mass
            before += weight;
            if (before > target) break;
        }
        break;
    }
    return drawn;
}

}  // namespace warren

// The operations between the matrix products, one row at a time.
#pragma once

#include <cmath>

#include "attention.hpp"

namespace warren {

// Up to kLanes floats, where fewer are left. The others are zero.
inline Floats load_first(const float* from, int count) {
    if (count >= kLanes) return load(from);
    Floats values{};
    std::memcpy(&values, from, size_t(count) * 4);
    return values;
}

inline void store_first(float* to, Floats values, int count) {
    std::memcpy(to, &values, size_t(std::min(count, kLanes)) * 4);
}

// Root mean square normalization (Zhang and Sennrich, arXiv:1910.07467); `to` may be `from`.
inline void rms_norm(const float* from, const float* weight, int width, float eps, float* to) {
    Floats even[kVectors] = {}, odd[kVectors] = {};
    int d = 0;
    for (; d + 2 * kPanel <= width; d += 2 * kPanel)
        for (int v = 0; v < kVectors; v++) {
            const Floats first = load(from + d + v * kLanes), second = load(from + d + kPanel + v * kLanes);
            even[v] = multiply_add(first, first, even[v]);
            odd[v] = multiply_add(second, second, odd[v]);
        }
    for (int v = 0; v < kVectors; v++) even[v] += odd[v];
    float total = sum(even);
    for (; d < width; d++) total += from[d] * from[d];
    const float factor = 1.0f / std::sqrt(total / width + eps);
    if (weight == nullptr) {
        for (d = 0; d < width; d++) to[d] = from[d] * factor;
    } else {
        for (d = 0; d < width; d++) to[d] = from[d] * factor * weight[d];
    }
}

// The sum of a row's numbers, each less `mean`, and squared if `is_squared`, in the order of `rms_norm`.
inline float centered_sum(const float* from, int width, float mean, bool is_squared) {
    Floats sums[kVectors] = {};
    int d = 0;
    for (; d + kPanel <= width; d += kPanel)
        for (int v = 0; v < kVectors; v++) {
            const Floats value = load(from + d + v * kLanes) - mean;
            sums[v] += is_squared ? value * value : value;
        }
    float total = sum(sums);
    for (; d < width; d++) total += is_squared ? (from[d] - mean) * (from[d] - mean) : from[d] - mean;
    return total;
}

// Layer normalization (Ba et al., arXiv:1607.06450); `to` may be `from`, weight and bias may be null.
inline void layer_norm(const float* from, const float* weight, const float* bias, int width, float eps, float* to) {
    const float mean = centered_sum(from, width, 0, false) / width;
    const float factor = 1.0f / std::sqrt(centered_sum(from, width, mean, true) / width + eps);
    for (int d = 0; d < width; d++) {
        const float value = (from[d] - mean) * factor;
        const float weighted = weight == nullptr ? value : value * weight[d];
        to[d] = bias == nullptr ? weighted : weighted + bias[d];
    }
}

enum NormKind : int32_t { kNoNorm = 0, kRmsNorm = 1, kLayerNorm = 2 };

struct Norm {
    const float* weight;  // may be null
    const float* bias;    // may be null
    int32_t kind;
    float eps;
};

// `to` may be `from`; without a norm they are equal.
inline void normalize(const Norm& norm, const float* from, int width, float* to) {
    if (norm.kind == kRmsNorm)
        rms_norm(from, norm.weight, width, norm.eps, to);
    else if (norm.kind == kLayerNorm)
        layer_norm(from, norm.weight, norm.bias, width, norm.eps, to);
    else if (to != from)
        std::memcpy(to, from, size_t(width) * 4);
}

inline void scale(float* row, int width, float factor) {
    for (int d = 0; d < width; d++) row[d] *= factor;
}

// The width need not be a multiple of kLanes.
inline void soft_cap(float* row, int width, float cap) {
    int d = 0;
    for (; d + kLanes <= width; d += kLanes) store(row + d, soft_capped(load(row + d), cap));
    for (; d < width; d++) row[d] = soft_capped(broadcast(row[d]), cap)[0];
}

// Rotary position embedding (Su et al., arXiv:2104.09864) of one head; `angles` holds head_dim / 2 cosines, then sines.
inline void rotate(float* head, const float* angles, int head_dim) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        const float first = head[i], second = head[i + half];
        head[i] = first * angles[i] - second * angles[i + half];
        head[i + half] = second * angles[i] + first * angles[i + half];
    }
}

// One head of a token's keys or values.
inline void store_head(const Cache& cache, uint8_t* layer, int64_t slot, int head, const float* from) {
    uint8_t* to = layer + slot * cache.slot_bytes() + head * cache.head_dim * cache.element_bytes();
    if (cache.type == kCacheFloat32) {
        std::memcpy(to, from, size_t(cache.head_dim) * 4);
    } else if (cache.type == kCacheBfloat16) {
        for (int i = 0; i < cache.head_dim; i++) reinterpret_cast<uint16_t*>(to)[i] = to_bf16(from[i]);
    } else {
        for (int i = 0; i < cache.head_dim; i++) reinterpret_cast<Float8*>(to)[i] = to_float8(from[i]);
    }
}

enum Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kRelu2 = 4, kClampedSwiglu = 5, kXielu = 6 };

inline Floats silu(Floats x) { return x / (exponential(-maximum(broadcast(-88.0f), x)) + 1.0f); }

template <int32_t kActivation>
inline Floats activated(Floats x) {
    if constexpr (kActivation == kSilu) return silu(x);
    if constexpr (kActivation == kGelu) return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
    if constexpr (kActivation == kGeluTanh)
        return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456f * multiply_add(x * x * x, broadcast(0.044715f), x)));
    const Floats positive = maximum(Floats{}, x);
    return kActivation == kRelu ? positive : positive * positive;
}

// activation(gate) * up (Shazeer, arXiv:2002.05202).
template <int32_t kActivation>
inline Floats gated(Floats gate, Floats up) {
    if constexpr (kActivation != kClampedSwiglu) return activated<kActivation>(gate) * up;
    gate = -maximum(broadcast(-7.0f), -gate);
    up = maximum(broadcast(-7.0f), -maximum(broadcast(-7.0f), -up));
    return (up + 1.0f) * (gate / (exponential(-maximum(broadcast(-88.0f), 1.702f * gate)) + 1.0f));
}

// Writes over the gate, or over the inputs if `up` is null. The width need not be a multiple of kLanes.
template <int32_t kActivation>
inline void activate_row(float* gate, const float* up, int width) {
    const auto value = [&](Floats x, Floats other) {
        return up == nullptr ? activated<kActivation>(x) : gated<kActivation>(x, other);
    };
    int d = 0;
    for (; d + kLanes <= width; d += kLanes) store(gate + d, value(load(gate + d), up ? load(up + d) : Floats{}));
    for (; d < width; d++) gate[d] = value(broadcast(gate[d]), broadcast(up ? up[d] : 0.0f))[0];
}

// xIELU (Huang and Schlag, arXiv:2411.13010), with the constants of kernels/reference/activate.py.
inline Floats xielu(Floats x, const float* constants) {
    const Floats low = -maximum(broadcast(-constants[3]), -x);
    // Near zero, e^x - 1 would cancel: the Taylor series.
    Floats series = broadcast(1.3888889e-3f);
    for (float factor : {8.3333333e-3f, 4.1666667e-2f, 1.6666667e-1f, 0.5f, 1.0f})
        series = multiply_add(series, low, broadcast(factor));
    const Floats curve = low > -0.25f ? series * low : exponential(low) - 1.0f;
    return (x > 0.0f ? constants[0] * x * x : (curve - x) * constants[1]) + constants[2] * x;
}

inline void xielu_row(float* row, int width, const float* constants) {
    int d = 0;
    for (; d + kLanes <= width; d += kLanes) store(row + d, xielu(load(row + d), constants));
    for (; d < width; d++) row[d] = xielu(broadcast(row[d]), constants)[0];
}

// `constants` are those of xIELU, which has no gate.
inline void activate(int32_t activation, const float* constants, float* gate, const float* up, int width) {
    switch (activation) {
        case kSilu: return activate_row<kSilu>(gate, up, width);
        case kGelu: return activate_row<kGelu>(gate, up, width);
        case kGeluTanh: return activate_row<kGeluTanh>(gate, up, width);
        case kRelu: return activate_row<kRelu>(gate, up, width);
        case kRelu2: return activate_row<kRelu2>(gate, up, width);
        case kXielu: return xielu_row(gate, width, constants);
        default: return activate_row<kClampedSwiglu>(gate, up, width);
    }
}

}  // namespace warren

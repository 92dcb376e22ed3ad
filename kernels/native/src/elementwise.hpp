// The operations between the matrix products, one row at a time.
#pragma once

#include <cmath>

#include "attention.hpp"

namespace warren {

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
    for (d = 0; d < width; d++) to[d] = from[d] * factor * weight[d];
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
    } else {
        for (int i = 0; i < cache.head_dim; i++) reinterpret_cast<uint16_t*>(to)[i] = to_bf16(from[i]);
    }
}

// silu(gate) * up (Shazeer, arXiv:2002.05202), written over the gate. The width need not be a multiple of kLanes.
inline void silu_mul(float* gate, const float* up, int width) {
    int d = 0;
    for (; d + kLanes <= width; d += kLanes) {
        const Floats x = load(gate + d);
        store(gate + d, x / (exponential(-maximum(broadcast(-88.0f), x)) + 1.0f) * load(up + d));
    }
    for (; d < width; d++) {
        const Floats x = broadcast(gate[d]);
        gate[d] = (x / (exponential(-maximum(broadcast(-88.0f), x)) + 1.0f))[0] * up[d];
    }
}

}  // namespace warren

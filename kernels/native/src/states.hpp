// Recurrent states in the blocks of the cache.
#pragma once

#include "elementwise.hpp"

namespace warren {

// The memory of the states of all layers: see worker.model.cache_layout.CacheLayout. A piece is the place of one layer's
// keys, or values, in a block; those of a block follow one another.
struct States {
    uint8_t* keys;
    uint8_t* values;
    int64_t place_bytes;  // from one place to the next
    int64_t piece_bytes;
    int num_places;

    float* piece(const int32_t* blocks, int index) const {
        const int block = index / (2 * num_places), rest = index % (2 * num_places);
        uint8_t* cache = rest % 2 ? values : keys;
        return reinterpret_cast<float*>(cache + rest / 2 * place_bytes + blocks[block] * piece_bytes);
    }

    // Calls `copy(at, offset, count)` for each part of the floats first .. first + count - 1 of a state in these blocks.
    template <class Copy>
    void visit(const int32_t* blocks, int first_piece, int64_t first, int count, const Copy& copy) const {
        const int64_t floats = piece_bytes / 4;
        for (int done = 0; done < count;) {
            const int64_t at = first + done, offset = at % floats;
            const int some = static_cast<int>(std::min<int64_t>(count - done, floats - offset));
            copy(piece(blocks, first_piece + static_cast<int>(at / floats)) + offset, done, some);
            done += some;
        }
    }

    // The same floats where they are: calls `take(index, at, rows)` for rows of `width` floats that follow one another. False,
    // and nothing is called, if a row could be divided between pieces.
    template <class Take>
    bool find(const int32_t* blocks, int first_piece, int64_t first, int count, int width, const Take& take) const {
        if (piece_bytes / 4 % width != 0 || first % width != 0) return false;
        int index = 0;
        visit(blocks, first_piece, first, count, [&](float* at, int, int some) { take(index++, at, some / width); });
        return true;
    }

    void read(const int32_t* blocks, int first_piece, int64_t first, int count, float* to) const {
        visit(blocks, first_piece, first, count,
              [&](const float* at, int offset, int some) { std::memcpy(to + offset, at, size_t(some) * 4); });
    }

    void write(const int32_t* blocks, int first_piece, int64_t first, int count, const float* from) const {
        visit(blocks, first_piece, first, count,
              [&](float* at, int offset, int some) { std::memcpy(at, from + offset, size_t(some) * 4); });
    }
};

constexpr int kMaxStateDim = 256;  // the most numbers that a state space keeps of an element

// What all recurrences of a step have in common. They write a row of `to` for each row of `from`.
struct Recurring {
    Team& team;
    const States states;
    const Batch batch;  // whose tables have the blocks of the state to read, then of the state to write
    const int num_state_blocks;
    const int first_piece;  // of the layer's state
    float* from;            // the outputs of the layer's first product, which may be overwritten
    const int64_t from_stride;
    float* to;  // the inputs of the layer's last product, rounded for it
    const int64_t to_stride;
    const int32_t format;  // of the last product

    int64_t first_token(int sequence) const { return batch.query_starts[sequence]; }
    int64_t last_token(int sequence) const { return batch.query_starts[sequence + 1]; }

    // Whether tokens of the sequence came before this step; otherwise its state is zero.
    bool has_state(int sequence) const {
        return batch.context_lens[sequence] > last_token(sequence) - first_token(sequence);
    }

    const int32_t* blocks_to_read(int sequence) const {
        return batch.block_tables + int64_t(sequence) * batch.max_num_blocks;
    }

    const int32_t* blocks_to_write(int sequence) const { return blocks_to_read(sequence) + num_state_blocks; }
};

}  // namespace warren

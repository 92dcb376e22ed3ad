// The C interface that kernels/native/library.py calls. Pointers belong to the caller; nothing is validated here.
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "decoder.hpp"
#include "sampling.hpp"

using namespace warren;

#pragma GCC visibility push(default)
extern "C" {

// The sizes of the structures, in the order of `STRUCTURES` in library.py.
void warren_sizes(int32_t* sizes) {
    const size_t all[] = {sizeof(Weight), sizeof(Rule), sizeof(Norm), sizeof(Mlp), sizeof(ExpertNorms), sizeof(Experts),
                          sizeof(Convolution), sizeof(Delta), sizeof(KimiDelta), sizeof(StateSpace), sizeof(SelectiveScan),
                          sizeof(Latent), sizeof(LayerInput), sizeof(LayerInputs), sizeof(Layer), sizeof(Junction), sizeof(Model),
                          sizeof(Cache), sizeof(Batch), sizeof(Heads), sizeof(Step), sizeof(Unpacked)};
    for (size_t size : all) *sizes++ = static_cast<int32_t>(size);
}

int warren_lanes() { return kLanes; }
int warren_has_bf16_dot() { return kHasBf16Dot; }
void warren_use_bf16_dot(int is_used) { uses_bf16_dot = kHasBf16Dot && is_used; }

// Returns whether they are used from now on.
int warren_use_tiles(int is_used) { return uses_tiles = kHasTiles && is_used && request_tiles(); }

Team* warren_team(int size) { return new Team(size); }
void warren_disband(Team* team) { delete team; }

int64_t warren_panel_bytes(int32_t format, int64_t inputs) { return panel_bytes(format, inputs); }

// Returns the first matrix that has a scale with which weights are infinite or NaN; `count` if none has.
int32_t warren_pack(Team* team, const Unpacked* matrices, int32_t count) {
    std::atomic<int32_t> first_odd{count};
    team->run([&] {
        for (const Unpacked* one = matrices; one < matrices + count; one++)
            team->share((one->outputs + kPanel - 1) / kPanel, [&](int panel) {
                const int first = panel * kPanel;
                uint8_t* to = one->panels + panel * panel_bytes(one->format, one->inputs);
                pack_panel(one->format, one->rows + first * one->row_bytes, std::min(kPanel, one->outputs - first),
                           one->inputs, to);
                // Matrices are packed in their order, so no earlier matrix will be found.
                int32_t none = count;
                if (!has_finite_headers(one->format, to, one->inputs))
                    first_odd.compare_exchange_strong(none, static_cast<int32_t>(one - matrices));
            });
    });
    return first_odd;
}

void warren_unpack_rows(const Weight* weight, const int64_t* rows, int32_t count, float* to) {
    for (int i = 0; i < count; i++) unpack_row(*weight, rows[i], to + int64_t(i) * weight->inputs);
}

// `code_bits` is 8 or 16: see `Codes`.
void warren_linear(Team* team, const float* x, int32_t rows, const Weight* weight, int32_t code_bits, float* out) {
    const int64_t num_blocks = weight->inputs / kBlock;
    std::vector<int16_t> codes(int64_t(rows) * weight->inputs);
    std::vector<float> scales(rows * num_blocks + 1), totals(rows * num_blocks + 1);
    std::vector<int32_t> sums(2 * rows * num_blocks + 2);
    const Codes encoded{codes.data(), scales.data(), totals.data(), sums.data(), code_bits};
    std::vector<float> rounded(x, x + int64_t(rows) * weight->inputs);
    for (int64_t r = 0; r < rows; r++)
        round_inputs(rounded.data() + r * weight->inputs, weight->inputs, weight->format);
    const Rows inputs{rounded.data(), weight->inputs, rows};
    team->run([&] { linear(*team, inputs, encoded, *weight, {out, weight->outputs, false}); });
}

void warren_attention(Team* team, const Cache* cache, const Batch* batch, const Heads* heads) {
    const auto tasks = attention_tasks(*batch);
    team->run([&] { attention(*team, *cache, *batch, *heads, tasks); });
}

// logits [rows, vocab_size]; the others [rows].
void warren_filter_floors(Team* team, const float* logits, int32_t rows, int32_t vocab_size, const float* temperatures,
                          const int64_t* top_ks, const float* top_ps, const float* min_ps, float* floors) {
    team->run([&] {
        std::vector<float> room(vocab_size + 1);
        team->share(rows, [&](int r) {
            const Filters filters{top_ks[r], top_ps[r], min_ps[r]};
            const Logits row{logits + int64_t(r) * vocab_size, vocab_size};
            floors[r] = filter_floor(row, temperatures[r], filters, room.data());
        });
    });
}

void warren_most_likely(Team* team, const float* logits, int32_t rows, int32_t vocab_size, int64_t* tokens) {
    team->each(rows, [&](int r) { tokens[r] = most_likely({logits + int64_t(r) * vocab_size, vocab_size}); });
}

// logits [.., vocab_size]; rows [num_masked], words [num_masked, num_words].
void warren_mask_logits(Team* team, float* logits, int32_t vocab_size, const int64_t* rows, const uint32_t* words,
                        int32_t num_masked, int32_t num_words) {
    team->each(num_masked,
               [&](int m) { mask(logits + rows[m] * vocab_size, vocab_size, words + int64_t(m) * num_words); });
}

// values and tokens are [rows, depth].
void warren_rank_logits(Team* team, const float* logits, int32_t rows, int32_t vocab_size, int32_t depth, float* totals,
                        float* values, int64_t* tokens) {
    team->each(rows, [&](int r) {
        const Logits row{logits + int64_t(r) * vocab_size, vocab_size};
        rank(row, depth, totals[r], values + int64_t(r) * depth, tokens + int64_t(r) * depth);
    });
}

void warren_draw_rows(Team* team, const float* logits, int32_t rows, int32_t vocab_size, const float* temperatures,
                      const float* floors, const float* uniforms, int64_t* drawn) {
    team->each(rows, [&](int r) {
        const Logits row{logits + int64_t(r) * vocab_size, vocab_size};
        drawn[r] = draw(row, temperatures[r], floors[r], uniforms[r]);
    });
}

// Commits the pages of a memory range if the system supports it; the content is unchanged.
void warren_commit(uint8_t* memory, int64_t bytes) {
#ifdef MADV_POPULATE_WRITE
    const auto first = reinterpret_cast<uintptr_t>(memory) & ~uintptr_t{4095};
    madvise(reinterpret_cast<void*>(first), reinterpret_cast<uintptr_t>(memory) + bytes - first, MADV_POPULATE_WRITE);
#else
    (void)memory, (void)bytes;
#endif
}

Workspace* warren_workspace() { return new Workspace; }
void warren_free_workspace(Workspace* workspace) { delete workspace; }

// Returns 0, or 1 if there is no memory for the activations.
int warren_forward(Team* team, Workspace* workspace, const Model* model, const Cache* cache, int64_t layer_bytes,
                   const Step* step) {
    try {
        Forward forward(*team, *workspace, *model, *cache, layer_bytes, *step);
        team->run([&] { forward.run(); });
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}

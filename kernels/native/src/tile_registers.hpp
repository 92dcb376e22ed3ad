// The tile registers of Intel's processors (AMX): matrices of up to 16 rows of 64 bytes, which one instruction multiplies.
//
// `tdpbsud` adds the products of four signed bytes and four unsigned bytes to each 32-bit sum. These sums are exact, so
// that the bits are those of every other processor. The instruction for bfloat16 numbers has one sum for even and one for
// odd inputs (TDPBF16PS in Intel's Software Developer's Manual), as no other processor has, and is not used.
#pragma once

#include <cstring>

#include "vector.hpp"

#if defined(__AVX512VNNI__) && __has_include(<amxint8intrin.h>) && __has_include(<sys/syscall.h>)
#include <sys/syscall.h>
#include <unistd.h>
#define WARREN_HAS_TILES
#endif

namespace warren {

constexpr int kRegisterRows = 16, kRegisterBytes = 64;

// The operand of `ldtilecfg`: the sizes of all registers.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int num_bytes) {
        rows[tile] = static_cast<uint8_t>(num_rows), row_bytes[tile] = static_cast<uint16_t>(num_bytes);
    }
};
static_assert(sizeof(TileShapes) == 64);

#ifdef WARREN_TILES  // emulates such a processor for tests on others
constexpr bool kHasTiles = true;

struct TileFile {
    TileShapes shapes;
    uint8_t bytes[8][kRegisterRows][kRegisterBytes];
};
static thread_local TileFile tile_file;

static bool request_tiles() { return true; }
static void begin_tiles(const TileShapes& shapes) { tile_file = {shapes, {}}; }
static void end_tiles() { tile_file = {}; }

template <int kTile>
static void clear_tile() {
    std::memset(tile_file.bytes[kTile], 0, sizeof tile_file.bytes[kTile]);
}

template <int kTile>
static void load_tile(const void* from, int64_t stride) {
    clear_tile<kTile>();
    for (int r = 0; r < tile_file.shapes.rows[kTile]; r++)
        std::memcpy(tile_file.bytes[kTile][r], static_cast<const char*>(from) + r * stride, tile_file.shapes.row_bytes[kTile]);
}

template <int kTile>
static void store_tile(void* to, int64_t stride) {
    for (int r = 0; r < tile_file.shapes.rows[kTile]; r++)
        std::memcpy(static_cast<char*>(to) + r * stride, tile_file.bytes[kTile][r], tile_file.shapes.row_bytes[kTile]);
}

template <int kSums, int kInputs, int kWeights>
static void multiply_tiles() {
    const TileShapes& shapes = tile_file.shapes;
    for (int r = 0; r < shapes.rows[kSums]; r++)
        for (int n = 0; n < shapes.row_bytes[kSums] / 4; n++) {
            int32_t sum;
            std::memcpy(&sum, &tile_file.bytes[kSums][r][4 * n], sizeof sum);
            for (int k = 0; k < shapes.row_bytes[kInputs]; k++)
                sum += static_cast<int8_t>(tile_file.bytes[kInputs][r][k]) * tile_file.bytes[kWeights][k / 4][4 * n + k % 4];
            std::memcpy(&tile_file.bytes[kSums][r][4 * n], &sum, sizeof sum);
        }
}
#elif defined(WARREN_HAS_TILES)
constexpr bool kHasTiles = true;

// Linux lets a process use the registers once it has asked (Documentation/arch/x86/xstate.rst).
inline bool request_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

inline void begin_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
// A thread without tiles is switched to and from faster.
inline void end_tiles() { asm volatile("tilerelease"); }

template <int kTile>
inline void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

template <int kTile>
inline void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(stride) : "memory");
}

template <int kTile>
inline void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(to), "r"(stride) : "memory");
}

// The bytes of `kInputs` are signed, and those of `kWeights` are unsigned.
template <int kSums, int kInputs, int kWeights>
inline void multiply_tiles() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kInputs), "i"(kWeights));
}
#else
constexpr bool kHasTiles = false;

inline bool request_tiles() { return false; }

// Templates name the operations, but do not use them.
void begin_tiles(const TileShapes& shapes);
void end_tiles();
template <int kTile>
void clear_tile();
template <int kTile>
void load_tile(const void* from, int64_t stride);
template <int kTile>
void store_tile(void* to, int64_t stride);
template <int kSums, int kInputs, int kWeights>
void multiply_tiles();
#endif

#ifdef WARREN_TILES
static bool uses_tiles = true;
#else
static bool uses_tiles = false;  // until it is known that the processor has them; not inline, see `uses_bf16_dot`
#endif

}  // namespace warren

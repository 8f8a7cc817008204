// AMX's registers of bfloat16, for kernels that follow this file when they are compiled. TILES is 1 where the processor
// has them. EMULATED_TILES computes them in plain C, for tests.
//
//     tile_load, tile_store   16 rows of 64 bytes, `stride` bytes apart
//     tile_dot                to [16, 16] float32 += rows [16, 32] * columns [16 pairs, 16, 2]
//
// They take denormal numbers as zero. A thread calls `begin_tiles` before its first product, and `end_tiles` after them.
#ifndef TILES
#if LANES == 16 && defined(__AMX_BF16__)
#define TILES 1
#else
#define TILES 0
#endif
#endif

#if TILES && !defined(EMULATED_TILES)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
// Whether the system grants what this uses: ARCH_REQ_XCOMP_PERM, XTILEDATA. To be asked once per process, before use.
int grants_tiles(void) { return !syscall(SYS_arch_prctl, 0x1023, 18); }
#define tile_load(to, from, stride) _tile_loadd(to, from, stride)
#define tile_store(from, to, stride) _tile_stored(from, to, stride)
#define tile_zero(to) _tile_zero(to)
#define tile_dot(to, rows, columns) _tile_dpbf16ps(to, rows, columns)
static void begin_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    __asm__ volatile("" : : "r"(&config) : "memory"); // GCC does not know that the next line reads all of it
    _tile_loadconfig(&config);
}
static void end_tiles(void) { _tile_release(); }
#else
int grants_tiles(void) { return 1; }
static void begin_tiles(void) {}
static void end_tiles(void) {}
#endif

#if TILES && defined(EMULATED_TILES)
static _Thread_local bf16 registers[8][16][32];
static void tile_load(int to, const void *from, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy(registers[to][r], (const char *)from + r * stride, 64);
}
static void tile_store(int from, void *to, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy((char *)to + r * stride, registers[from][r], 64);
}
static void tile_zero(int to) { memset(registers[to], 0, sizeof registers[to]); }
static void tile_dot(int to, int rows, int columns) {
    float sums[16][16];
    memcpy(sums, registers[to], sizeof sums);
    for (int r = 0; r < 16; r++)
        for (int column = 0; column < 16; column++)
            for (int k = 0; k < 32; k++)
                sums[r][column] += widen(registers[rows][r][k]) * widen(registers[columns][k / 2][2 * column + k % 2]);
    memcpy(registers[to], sums, sizeof sums);
}
#endif

// Tile registers, for the AMX kernels.
#pragma once

#include "common.h"

#define TILE 16         // rows of a tile, and float32 columns of its accumulator
#define TILE_K 32       // bfloat16 values in a row of a tile
#define TILE_BYTES 1024

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((packed, aligned(64))) tile_config;

// Gives every tile its full size; short blocks of rows are padded with zeros. A thread calls this once per kernel.
static inline void configure_tiles(void) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = TILE;
    }
    _tile_loadconfig(&config);
}

/*
small_sizes.h: sizes of pieces of work, so small that the small models and files of tests have several pieces, the last
of them partial. Include it before all other headers. Results do not depend on the sizes, except for the order of sums
(LOGIT_ROWS). Also a short trial of --minutes.
*/
#pragma once
#define INIT_CHUNK ((size_t)101)
#define LOGIT_ROWS(row_bytes) ((void)(row_bytes), (size_t)7)
#define PREFILL_ROWS 8
#define RANKS_PIECE ((size_t)1000)
#define CHECKPOINT_STAGING 1208
#define CHECKPOINT_PIECE 37
#define CHECKSUM_PIECE 999
#define SAFETENSORS_STAGING 488
#define FILE_PIECE ((size_t)1021)
#define FIRST_TOKENS_PIECE 23
#define COMM_QUEUE 13
#define COMM_BLOCK 13
#define BF16_PRODUCTS 2
#define WATCH_SPARE 2
#define TRIAL_SECONDS 0.05

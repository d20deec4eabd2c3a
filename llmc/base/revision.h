/*
revision.h: the source revision of the program, for --version, run.json and the comparison of ranks.

A separate object file contains it, so that a commit recompiles nothing else. Without that object it is "unknown".
*/
#ifndef LLMC_REVISION_H
#define LLMC_REVISION_H

#ifdef __cplusplus
extern "C" {
#endif
extern const char program_revision[] __attribute__((weak)); // of build/revision.c
#ifdef __cplusplus
}
#endif

static inline const char *source_revision(void) { return program_revision ? program_revision : "unknown"; }
#endif

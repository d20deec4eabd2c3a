/*
revision: the source revision that a program was linked from, for --version, run.json and the comparison of ranks.

It is in an object of its own, which make compiles anew for each revision, so that a commit recompiles nothing else. A
program that is linked without that object says "unknown".
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

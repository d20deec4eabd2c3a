/*
revision.h: version and source revision of the program, for --version, run.json, checkpoints and comparing ranks.

docs/changelog.md says what the parts of a version mean. A separate object file contains the revision, so that a commit
recompiles nothing else. Without that object it is "unknown".
*/
#pragma once

#ifdef __cplusplus
extern "C" {
#endif
extern const char program_revision[] __attribute__((weak)); // defined in build/revision.c
#ifdef __cplusplus
}
#endif

static const char program_version[] = "0.9.0";
static inline const char *source_revision(void) { return program_revision ? program_revision : "unknown"; }

/*
faulty_diffv2.c: the trainer with planned faults (planned_faults.h), for the tests of many ranks (tests/programs).

  BUCKET=N       elements of a bucket
  PEAK=FILE      each rank appends its largest resident size in KiB at the end

Pieces of work are small, so that a tiny model has several of each (small_sizes.h); here also the buckets of a group and
the parts of a file that have checksums of their own. The queue of operations (COMM_QUEUE) has room for the buckets of
three layers: with a shorter one the trainer would wait for late data when it begins an operation.
*/
#include "small_sizes.h"
#define BUCKET_ELEMENTS(ranks) ((void)(ranks), (size_t)(getenv("BUCKET") ? atoi(getenv("BUCKET")) : 3000))
#define CHECKSUM_CHUNK 5000
#define PLANNED_FAULTS
#define main trainer_main
#include "../train_diffv2.c"
#undef main
#include "planned_faults.h"
#include <sys/resource.h>

static void report_peak_memory(void) {
    const char *path = getenv("PEAK");
    struct rusage usage;
    FILE *f = path && getrusage(RUSAGE_SELF, &usage) == 0 ? fopen(path, "a") : NULL;
    if (!f) return; // the test misses the number
    fprintf(f, "%ld\n", usage.ru_maxrss);
    fclose(f);
}

int main(int argc, char **argv) {
    atexit(report_peak_memory); // the trainer ends in program_exit
    return trainer_main(argc, argv);
}

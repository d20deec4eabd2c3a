/*
cuda_collectives.h: NCCL with one rank.
*/
#pragma once
#include "../llmc/comm/comm.h"
#include "harness.h"

#ifdef USE_NCCL
// What can be tested of NCCL on a machine with one GPU: the library loads, its calls succeed, streams and events are in
// order, and the watchdog thread ends.
static void collectives_of_one_rank(size_t count) {
    CUDA_CHECK(cudaGetDevice(&nccl.device));
    comm.on = true;
    NCCL_CHECK(ncclGetUniqueId(&nccl.id));
    nccl_init();
    nccl_split(1);
    nccl_self_test(count * sizeof(grad_t));
    grad_t *bucket = (grad_t *)buffer_alloc(count * sizeof(grad_t), "a test"),
           *host = (grad_t *)checked_calloc(count, sizeof(grad_t)), *sum;
    nccl.received_bytes = count * sizeof(grad_t);
    nccl.received = (grad_t *)buffer_alloc(nccl.received_bytes, "a test");
    sum = (grad_t *)buffer_alloc(count * sizeof(grad_t), "a test");
    for (size_t i = 0; i < count; i++) host[i] = (grad_t)(i % 65536);
    buffer_upload(bucket, host, count * sizeof(grad_t));
    uint64_t first = comm_reduce_scatter(bucket, count, sum, true, true),
             second = comm_reduce_scatter(bucket, count, sum, true, true);
    EXPECT(second == first + 1, "tickets %d and %d", (int)first, (int)second);
    comm_wait(comm_all_gather(sum, sum + comm_rank() * count, count * sizeof(grad_t)));
    buffer_download(host, sum, count * sizeof(grad_t));
    for (size_t i = 0; i < count; i++)
        if (host[i] != 2 * (grad_t)(i % 65536)) {
            EXPECT(false, "element %zu is %g, not %zu", i, (double)host[i], 2 * (i % 65536));
            break;
        }
    double until = now_seconds() + 5;
    while (WATCH_GET(self.collectives) < second && now_seconds() < until) usleep(1000);
    EXPECT(WATCH_GET(self.collectives) >= second, "the watchdog thread has counted %d collectives",
           (int)WATCH_GET(self.collectives));
    buffer_free(bucket);
    buffer_free(sum);
    free(host);
    comm_close();
    EXPECT(!nccl.handle && !comm.on, "the communicator is still open");
}
#endif

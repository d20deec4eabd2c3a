/*
device.h: tests of the matching of device names, and of too little memory on the CPU.
*/
#pragma once
#include "harness.h"
#include "../llmc/cuda/device_peak.h"

// Names as CUDA reports them.
static void test_device_full_names(void) {
    static const struct {
        const char *name;
        int multiprocessors;
        double tflops; // 0: not in the table
    } devices[] = {
        {"NVIDIA H100 80GB HBM3", 132, 989.4},
        {"NVIDIA H100 PCIe", 114, 756.5},
        {"NVIDIA H100 NVL", 132, 835.5},
        {"NVIDIA H200", 132, 989.4},
        {"NVIDIA H200 NVL", 132, 835.5},
        {"NVIDIA GH200 480GB", 132, 989.4},
        {"NVIDIA GH200 144G HBM3e", 132, 989.4},
        {"NVIDIA A100-SXM4-40GB", 108, 312},
        {"A100-SXM4-80GB", 108, 312}, // older drivers
        {"NVIDIA A100-PCIE-40GB", 108, 312},
        {"NVIDIA A100 80GB PCIe", 108, 312},
        {"NVIDIA B200", 148, 2250},
        {"NVIDIA B300 SXM6 AC", 148, 2250},
        {"NVIDIA GB200", 152, 2500},
        {"NVIDIA L40S", 142, 362.05},
        {"NVIDIA L40", 142, 181.05},
        {"NVIDIA GeForce RTX 3080", 70, 61.3},
        {"NVIDIA GeForce RTX 4090", 128, 165.2},
        {"NVIDIA GeForce RTX 5090", 170, 209.5},
        {"NVIDIA GeForce RTX 4090 D", 114, 0},
        {"NVIDIA GeForce RTX 5090 D", 170, 0},
        {"NVIDIA GeForce RTX 4090 Laptop GPU", 76, 0},
        {"NVIDIA GeForce RTX 3080 Laptop GPU", 48, 0},
        {"NVIDIA GeForce RTX 3080 Ti Laptop GPU", 58, 0},
        {"NVIDIA GeForce RTX 4090", 76, 0}, // another chip under the name
        {"NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14, 0},
        {"NVIDIA A100-SXM4-40GB MIG 7g.40gb", 98, 0},
        {"NVIDIA H100 80GB HBM3 MIG 7g.80gb", 132, 0},
        {"NVIDIA B200 MIG 1g.23gb", 18, 0},
        {"NVIDIA B300 SXM6 AC MIG 1g.34gb", 18, 0},
        {"NVIDIA A100-SXM-64GB", 124, 0}, // custom part
        {"NVIDIA H100 64GB HBM2", 114, 0},
        {"NVIDIA H100", 132, 0},
        {"NVIDIA H20", 78, 0},
        {"NVIDIA L4", 142, 0},
        {"Tesla V100-SXM2-16GB", 80, 0},
        {"NVIDIA ", 132, 0},
        {"", 0, 0},
    };
    for (size_t i = 0; i < sizeof(devices) / sizeof(devices[0]); i++) {
        const DevicePeak *row = device_peak_find(devices[i].name, devices[i].multiprocessors);
        EXPECT((row ? row->tflops : 0) == devices[i].tflops, "'%s' with %d multiprocessors has %.1f TFLOP/s, not %.1f",
               devices[i].name, devices[i].multiprocessors, row ? row->tflops : 0, devices[i].tflops);
    }
}

// Under a limit of the address space, which AddressSanitizer exceeds. tests/cuda/test_cuda_memory.py has that of a
// device.
static void test_failed_allocation(void) {
#ifndef __SANITIZE_ADDRESS__
    static const int tokens[1000];
    TestDirectory d = test_make_directory();
    ProgramResult r;
    test_write_shard(test_text("%s/train.bin", d.path), 2, tokens, 1000);
    run_command(&r,
                "cd '%s' && ulimit -v 4000000 && '%s' --train-data train.bin --layers 2 --hidden 64 --heads 4 "
                "--kv-heads 2 --head-dim 16 --ffn 128 --seq-len 64 "
                "--batch-size 40000 --steps 1 --threads 2 --no-memory-check --out run",
                d.path, test_program_path());
    EXPECT(r.status == EXIT_FAILED && count_lines(r.err) == 1 && strstr(r.err, "out of memory: ") &&
               strstr(r.err, "MiB for activations; the run needs ") && strstr(r.err, "--recompute 1 (") &&
               strstr(r.err, "--batch-size 20000 ("),
           "status %d: %.600s", r.status, r.err);
    EXPECT(!directory_exists(test_text("%s/run", d.path)), "a run that could not start left a directory");
#endif
}

static const Test device_tests[] = {
    {"a device matches a row by its full name only", test_device_full_names},
    {"a failed allocation on the CPU reports the memory of the run and the options that reduce it",
     test_failed_allocation},
};

/*
cudnn_plans.cpp: asks cuDNN for the plans of llmc/cuda/attention_cudnn.cpp for GPUs that this machine does not have.

cuDNN plans for a device from a description of it. Its heuristics, the compilation of its kernels and the workspace
sizes are real; only loading a kernel calls a driver that does nothing (tests/cudnn_driver.c, which must come first in
LD_LIBRARY_PATH).

  LD_LIBRARY_PATH=build/cuda_bf16/no_gpu build/cuda_bf16/cudnn_plans [WORDS]     all rows, or those that contain WORDS

Each row is a plan that must be made, or must be refused; B of a row with documents is their number. On Hopper the
workspace must be, to a few KiB, what --dry-run counts where there is no device (attention_estimate of
llmc/ops/attention/attention_plans.cuh). It ends with `N passed, N failed`.
*/
#include "../llmc/cuda/attention_cudnn.cpp"

#include <cstdlib>
#include <string>
#include <vector>

struct Device {
    int capability, multiprocessors, shared_bytes;
    const char *name;
};
static const Device devices[] = {{80, 108, 166912, "A100"},
                                 {89, 128, 101376, "RTX 4090"},
                                 {90, 132, 232448, "H200"},
                                 {100, 148, 232448, "B200"},
                                 {120, 170, 101376, "RTX 5090"}};

enum { FORWARD = 1, BACKWARD = 2, DETERMINISTIC = 4, ALL = 7 };
enum { LATER = FORWARD | 8 }; // all from cuDNN 9.23 on
static const int directions[] = {FORWARD, BACKWARD, DETERMINISTIC};
struct Row {
    const char *why;
    int B, T, NQ, NKV, D, DV, sets, window, documents, add_dv; // add_dv: dV in memory of its own
    int on_80, on_90, on_100, on_120;                          // the directions that cuDNN takes on sm_80, ...
};
// clang-format off
static const Row rows[] = {
    {"124M, diff_v2",                   8,  1024,  24, 6,  64,  64,  1, 0,    0, 0, ALL,     ALL,     ALL,     ALL},
    {"1.4B, diff_v2",                   4,  2048,  32, 8,  128, 128, 1, 0,    0, 0, ALL,     ALL,     ALL,     ALL},
    {"3B at 4K, diff_v2, one sequence", 1,  4096,  48, 12, 128, 128, 1, 0,    0, 0, ALL,     ALL,     ALL,     ALL},
    {"without groups",                  2,  1024,  12, 12, 64,  64,  1, 0,    0, 0, ALL,     ALL,     ALL,     ALL},
    {"124M, diff_v1: values of 2D",     8,  1024,  6,  3,  64,  128, 2, 0,    0, 0, ALL,     ALL,     ALL,     ALL},
    {"3B, diff_v1: values of 256",      1,  2048,  12, 6,  128, 256, 2, 0,    0, 0, FORWARD, ALL,     FORWARD, FORWARD},
    {"3B, diff_v1, a half",             1,  2048,  12, 6,  128, 128, 2, 0,    0, 0, ALL,     ALL,     ALL,     ALL},
    {"diff_scalar: half heads, DV 64",  2,  300,   12, 3,  32,  64,  2, 0,    0, 0, ALL,     ALL,     ALL,     ALL},
    {"the narrowest",                   1,  131,   2,  1,  8,   8,   1, 0,    0, 0, ALL,     ALL,     ALL,     ALL},
    {"tests: width 16",                 2,  65,    8,  4,  16,  16,  1, 0,    0, 0, ALL,     ALL,     ALL,     ALL},
    {"tests: no power of two",          2,  17,    4,  1,  72,  72,  1, 0,    0, 0, ALL,     ALL,     ALL,     ALL},
    {"the widest --head-dim",           1,  65,    2,  1,  256, 256, 1, 0,    0, 0, FORWARD, ALL,     LATER,   FORWARD},
    {"widths that cuDNN does not take", 1,  33,    3,  3,  12,  12,  1, 0,    0, 0, 0,       0,       0,       0},
    {"124M, window of 256",             8,  1024,  24, 6,  64,  64,  1, 256,  0, 0, ALL,     ALL,     ALL,     ALL},
    {"16K, window of 1000",             1,  16384, 32, 8,  128, 128, 1, 1000, 0, 0, ALL,     ALL,     ALL,     ALL},
    {"a window of one key",             2,  65,    8,  4,  16,  16,  1, 1,    0, 0, ALL,     ALL,     ALL,     ALL},
    {"diff_v1, window of 100",          2,  300,   6,  3,  64,  128, 2, 100,  0, 0, ALL,     ALL,     ALL,     ALL},
    {"124M, documents",                 32, 1024,  24, 6,  64,  64,  1, 0,    1, 0, FORWARD, ALL,     ALL,     FORWARD},
    {"124M, documents, window of 256",  32, 1024,  24, 6,  64,  64,  1, 256,  1, 0, FORWARD, ALL,     ALL,     FORWARD},
    {"1.4B, documents",                 80, 2048,  32, 8,  128, 128, 1, 0,    1, 0, FORWARD, ALL,     ALL,     FORWARD},
    {"documents, tests: width 16",      3,  65,    8,  4,  16,  16,  1, 9,    1, 0, FORWARD, ALL,     ALL,     FORWARD},
    {"documents, diff_v1",              3,  300,   6,  3,  64,  128, 2, 0,    1, 0, FORWARD, ALL,     ALL,     FORWARD},
    {"124M, diff_grouped_2",            8,  1024,  18, 6,  64,  64,  1, 0,    0, 0, ALL,     ALL,     ALL,     ALL},
    {"124M, grouped_4: groups of 5",    8,  1024,  15, 3,  64,  64,  1, 0,    0, 0, ALL,     ALL,     ALL,     ALL},
    {"1.4B, grouped_4: groups of 5",    4,  2048,  20, 4,  128, 128, 1, 0,    0, 0, ALL,     ALL,     ALL,     ALL},
    {"124M, grouped_4, window of 256",  8,  1024,  15, 3,  64,  64,  1, 256,  0, 0, ALL,     ALL,     ALL,     ALL},
    {"124M, grouped_2, documents",      32, 1024,  18, 6,  64,  64,  1, 0,    1, 0, FORWARD, ALL,     ALL,     FORWARD},
    {"tests: grouped_4, width 16",      2,  65,    10, 2,  16,  16,  1, 0,    0, 0, ALL,     ALL,     ALL,     ALL},
    {"124M, diff_v1, second key set",   8,  1024,  6,  3,  64,  128, 2, 0,    0, 1, ALL,     ALL,     ALL,     ALL},
    {"one position",                    3,  1,     2,  1,  16,  16,  1, 0,    0, 0, FORWARD, FORWARD, FORWARD, FORWARD},
};
// clang-format on

// As the trainer lays it out: rows [q | k | v], key sets whose heads alternate.
static CudnnAttention attention_of(const Row &r, int direction) {
    CudnnAttention a;
    memset(&a, 0, sizeof(a));
    int ld = (r.sets * (r.NQ + r.NKV) * r.D + r.NKV * r.DV + 63) / 64 * 64;
    a.backward = direction != FORWARD, a.deterministic = direction == DETERMINISTIC;
    a.B = r.B, a.T = r.T, a.NQ = r.NQ, a.NKV = r.NKV, a.D = r.D, a.DV = r.DV;
    a.window = r.window, a.documents = r.documents;
    a.scale = 0.125f;
    a.q = a.k = CudnnStrides{ld, r.sets * r.D};
    a.v = CudnnStrides{ld, r.DV};
    a.out = CudnnStrides{r.sets * r.NQ * r.DV, r.sets * r.DV};
    a.dq = a.q, a.dk = a.k, a.dv = r.add_dv ? CudnnStrides{r.NKV * r.DV, r.DV} : a.v;
    return a;
}

static std::shared_ptr<fe::DeviceProperties> properties(const Device &d) {
    char text[2048];
    snprintf( // the last three are read by later versions than 9.19, up to 9.28
        text, sizeof(text),
        "{\"deviceName\": \"%s\", \"deviceVer\": %d, \"multiProcessorCount\": %d, \"maxSharedMemoryPerBlockOptin\": "
        "%d, "
        "\"maxSharedMemoryPerBlock\": 49152, \"reservedSharedMemoryPerBlock\": 1024, \"totalGlobalMem\": 34359738368, "
        "\"cudaDeviceId\": 0, \"driverVer\": 13000, \"maxGridSize\": [2147483647, 65535, 65535], "
        "\"maxBlockSize\": [1024, 1024, 64], \"regsPerBlock\": 65536, \"maxRegistersPerSM\": 65536, \"warpSize\": 32, "
        "\"maxThreadsPerBlock\": 1024, \"maxThreadsPerSM\": 2048, \"maxCtasPerSM\": 32, \"smClockRateKHz\": 1980000, "
        "\"memClockRateKHz\": 3201000, \"l2CacheSize\": 62914560, \"pciDeviceId\": 0, \"isTccDriver\": 0, "
        "\"supportCoopLaunch\": 1, \"smCountOrigin\": 0, \"oversizedSharedMemoryPerBlock\": %d, \"memoryBusWidth\": "
        "5120}",
        d.name, d.capability * 10, d.multiprocessors, d.shared_bytes, d.shared_bytes);
    auto made = std::make_shared<fe::DeviceProperties>();
    fe::error_t status = made->deserialize(std::vector<uint8_t>(text, text + strlen(text)));
    if (status.is_good()) return made;
    fprintf(stderr, "cuDNN does not take the description of the device: %s\n", status.get_message().c_str());
    exit(1);
}

static bool plan_for(const Device &device, const CudnnAttention &a, int64_t *bytes, char *why, size_t size) {
    Graph graph;
    graph.set_sm_version(device.capability);
    graph.set_device_properties(properties(device));
    describe(graph, a);
    return good(graph.validate(), "not a graph", why, size) &&
           good(graph.build_operation_graph(), "no operation graph", why, size) &&
           good(graph.create_execution_plans({fe::HeurMode_t::A}), "no plan", why, size) &&
           good(graph.check_support(), "not supported", why, size) &&
           good(graph.build_plans(), "the plan was not built", why, size) &&
           good(graph.get_workspace_size(*bytes), "no workspace size", why, size);
}

// attention_estimate. cuDNN adds small things, such as the lengths of sequences where T is no multiple of its tiles,
// and for documents descriptions of their tensors.
enum { SMALL = 4096, DOCUMENTS = 16384, DOCUMENT = 256 };
static int64_t estimate(const CudnnAttention &a) {
    int64_t T = a.T, queries = (int64_t)a.B * a.NQ * T, bytes = 4 * queries;
    if (!a.backward) return 0;
    bytes +=
        a.deterministic ? 2 * (int64_t)a.B * a.NQ * ((T + 63) / 64 * 64) * ((T + 127) / 128 * 128) : 4 * queries * a.D;
    return bytes + (a.NQ > a.NKV ? 2 * queries * (a.D + a.DV) : 0);
}

int main(int argc, char **argv) {
    int passed = 0, failed = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("%s\n", cudnn_attention_version());
    for (const Device &device : devices)
        for (const Row &row : rows)
            for (int direction : directions) {
                char line[300], why[400] = "";
                snprintf(line, sizeof(line), "%s, %s: B=%d T=%d NQ=%d NKV=%d D=%d DV=%d W=%d  (%s)", device.name,
                         direction == FORWARD    ? "forward"
                         : direction == BACKWARD ? "backward"
                                                 : "deterministic backward",
                         row.B, row.T, row.NQ, row.NKV, row.D, row.DV, row.window, row.why);
                if (argc > 1 && !strstr(line, argv[1])) continue;
                int major = device.capability / 10;
                int wanted = major == 8 ? row.on_80 : major == 9 ? row.on_90 : major == 10 ? row.on_100 : row.on_120;
                if (wanted == LATER && cudnnGetVersion() >= 92300) wanted = ALL;
                CudnnAttention a = attention_of(row, direction);
                int64_t bytes = 0;
                bool taken = plan_for(device, a, &bytes, why, sizeof(why)),
                     right = taken == ((wanted & direction) != 0);
                int64_t small = a.documents ? DOCUMENTS + DOCUMENT * a.B : SMALL;
                if (taken && major == 9) right = right && bytes >= estimate(a) && bytes <= estimate(a) + small;
                printf("%s %s: ", right ? "ok  " : "FAIL", line);
                if (taken) printf("%.3f MiB%s\n", (double)bytes / 1048576, right ? "" : ", which was not expected");
                else printf("%s\n", why);
                right ? passed++ : failed++;
            }
    printf("%d passed, %d failed\n", passed, failed);
    return failed || !passed;
}

/*
counts.cpp: what kernels do, in programs built with COUNT=yes. At its end a process appends a row per kernel to the file
PTX_COUNTS, with a name and a number in each column after the first:

  kernel, blocks        blocks of threads that ran
  global requests       accesses of a warp to device memory
  sectors               the sectors of 32 bytes that they touch: 4 per request where 32 lanes read 4 adjacent bytes each
  shared requests       accesses of a warp to shared memory
  wavefronts            the passes that they take: 1 per 128 bytes without bank conflicts
  CLASS                 instructions executed, summed over threads (counted_class in forms.py)

Lanes run one after another. Therefore the n-th execution of an instruction by one lane counts as one access with the
n-th of the other lanes, also where the lanes are in different iterations of a loop.
*/
#include "machine.h"
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptx {
namespace {

struct Accesses { // of an instruction to one of the memories, in the running block
    u32 bytes;
    std::vector<u64> of_thread[1024];
};
struct Totals {
    u64 blocks, requests[2], parts[2]; // of global memory, of shared memory
};

std::unordered_map<const Site *, Accesses> accesses[2]; // global, shared
std::map<const Kernel *, Totals> totals;
const Kernel *running;

typedef std::vector<std::pair<int, u64>> Addresses; // of lanes

u64 sectors(const Addresses &addresses, u32 bytes) {
    std::set<u64> touched;
    for (auto [lane, address] : addresses)
        for (u64 sector = address / 32; sector <= (address + bytes - 1) / 32; sector++) touched.insert(sector);
    return touched.size();
}
// 32 banks of 4 bytes. Lanes that read 8 or 16 bytes pass in two or four groups, each without conflicts on its own.
u64 wavefronts(const Addresses &addresses, u32 bytes) {
    int lanes = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
    std::map<int, std::set<u64>> words[32]; // by group, of each bank
    size_t most[4] = {};
    for (auto [lane, address] : addresses)
        for (u64 word = address / 4; word <= (address + bytes - 1) / 4; word++) {
            std::set<u64> &of_bank = words[word % 32][lane / lanes];
            of_bank.insert(word);
            most[lane / lanes] = std::max(most[lane / lanes], of_bank.size());
        }
    return most[0] + most[1] + most[2] + most[3];
}

void end_block() {
    if (!running) return;
    Totals &sum = totals[running];
    sum.blocks++;
    for (int in_shared = 0; in_shared < 2; in_shared++) {
        for (const auto &[site, a] : accesses[in_shared])
            for (int warp = 0; warp < 32; warp++)
                for (size_t n = 0;; n++) {
                    Addresses addresses;
                    for (int lane = 0; lane < 32; lane++) {
                        const std::vector<u64> &own = a.of_thread[32 * warp + lane];
                        if (n < own.size()) addresses.push_back({lane, own[n]});
                    }
                    if (addresses.empty()) break;
                    sum.requests[in_shared]++;
                    sum.parts[in_shared] += in_shared ? wavefronts(addresses, a.bytes) : sectors(addresses, a.bytes);
                }
        accesses[in_shared].clear();
    }
}

void write_counts() {
    end_block();
    const char *path = getenv("PTX_COUNTS");
    FILE *file = path ? fopen(path, "a") : nullptr;
    if (!file) return;
    for (const auto &[kernel, sum] : totals) {
        std::map<std::string, u64> classes;
        for (int i = 0; i < kernel->class_count; i++) {
            const ClassCount &c = kernel->classes[i];
            classes[c.name] += kernel->executed[c.block] * (u64)c.count;
        }
        fprintf(file, "%s\tblocks=%llu\tglobal requests=%llu\tsectors=%llu\tshared requests=%llu\twavefronts=%llu",
                kernel->name, (unsigned long long)sum.blocks, (unsigned long long)sum.requests[0],
                (unsigned long long)sum.parts[0], (unsigned long long)sum.requests[1],
                (unsigned long long)sum.parts[1]);
        for (const auto &[name, count] : classes)
            if (count) fprintf(file, "\t%s=%llu", name.c_str(), (unsigned long long)count);
        fprintf(file, "\n");
    }
    fclose(file);
}

} // namespace

void begin_counted_block(const Kernel &kernel) {
    static const int at_end = atexit(write_counts);
    (void)at_end;
    end_block();
    running = &kernel;
}

void count_access(bool in_shared, u64 address, u32 bytes, const Site &site) {
    int thread = (int)(position.thread.x +
                       position.block_size.x * (position.thread.y + position.block_size.y * position.thread.z));
    Accesses &a = accesses[in_shared][&site];
    a.bytes = bytes;
    a.of_thread[thread].push_back(address);
}

} // namespace ptx

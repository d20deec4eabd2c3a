/*
runtime.cpp: runs translated kernels in place of those that the host's compiler made from the source, and describes
their errors. A kernel without a translation ends the program.
*/
#include "hopper.h"
#include <memory>
#include <unordered_map>
#include <vector>

namespace ptx {

char *shared_memory;
const u8 *shared_usable;
u32 shared_bytes, dynamic_offset;
Range recent[spans];

namespace {

constexpr u32 gap = 64; // bytes around the dynamic array, as around the others (SHARED_GAP)

std::unordered_map<const void *, const Kernel *> &kernels() {
    static std::unordered_map<const void *, const Kernel *> all;
    return all;
}

// The shared memory of a launch: static arrays, then the dynamic one.
struct Layout {
    std::vector<u8> usable;
    u32 dynamic_offset;
};

Layout shared_layout(const Kernel &kernel, size_t dynamic_bytes) {
    u32 end = gap;
    for (int i = 0; i < kernel.array_count; i++) end = max(end, kernel.arrays[i].offset + kernel.arrays[i].bytes + gap);
    Layout layout;
    layout.dynamic_offset = (end + 31) / 32 * 32; // aligned to 16
    layout.usable.assign(layout.dynamic_offset + dynamic_bytes + gap, 0);
    for (int i = 0; i < kernel.array_count; i++)
        memset(&layout.usable[kernel.arrays[i].offset], 1, kernel.arrays[i].bytes);
    memset(&layout.usable[layout.dynamic_offset], 1, dynamic_bytes);
    return layout;
}

uint64_t block_of_memory;

void begin_block(const Kernel &kernel, const Layout &layout) {
    static std::vector<char> memory;
    block_of_memory = cuda_on_cpu::block_serial;
    memory.assign(layout.usable.size() + 32, (char)0xFF);
    shared_memory = (char *)(((uintptr_t)memory.data() + 31) / 32 * 32);
    shared_usable = layout.usable.data();
    shared_bytes = (u32)layout.usable.size();
    dynamic_offset = layout.dynamic_offset;
    for (Range &span : recent) span = {nullptr, nullptr};
    begin_hopper_block(kernel.asynchronous);
}

// What a thread of this launch runs.
std::function<void()> translated(const cuda_on_cpu::Launch &launch, const std::vector<char> &parameters) {
    auto found = kernels().find(launch.function);
    if (found == kernels().end())
        fail("kernel %s launched in %s:%d is not in the PTX", launch.kernel, launch.place.file, launch.place.line);
    const Kernel &kernel = *found->second;
    if (parameters.size() != kernel.parameter_bytes)
        fail("kernel %s has %zu bytes of parameters, and %u in the PTX", launch.kernel, parameters.size(),
             kernel.parameter_bytes);
    if (launch.block.x * launch.block.y * launch.block.z > kernel.most_threads)
        fail("kernel %s launched in %s:%d: a block of %lld threads; its launch bounds are %d", launch.kernel,
             launch.place.file, launch.place.line, launch.block.x * launch.block.y * launch.block.z,
             kernel.most_threads);
    size_t total = launch.shared_bytes;
    for (int i = 0; i < kernel.array_count; i++) total += kernel.arrays[i].bytes;
    if (total > cuda_on_cpu::dynamic_shared_limit(launch.function))
        fail("kernel %s launched in %s:%d: %zu bytes of shared memory", launch.kernel, launch.place.file,
             launch.place.line, total);
    struct alignas(128) Line { // the alignment of parameters in PTX, at most
        char bytes[128];
    };
    auto aligned = std::make_shared<std::vector<Line>>(parameters.size() / sizeof(Line) + 1);
    memcpy(aligned->data(), parameters.data(), parameters.size());
    auto layout = std::make_shared<Layout>(shared_layout(kernel, launch.shared_bytes));
    return [&kernel, aligned, layout] {
        if (block_of_memory != cuda_on_cpu::block_serial) begin_block(kernel, *layout);
        const char *begin = (const char *)aligned->data();
        kernel.run({begin, begin + kernel.parameter_bytes});
    };
}

} // namespace

AddKernels::AddKernels(const char *architecture, const Kernel *first, size_t count) {
    setenv("CUDA_ON_CPU_CAPABILITY", architecture, 1); // of the device that the host sees
    for (size_t i = 0; i < count; i++) kernels()[first[i].host] = &first[i];
    cuda_on_cpu::replace_kernel = translated;
}

std::string where(const Site &site) {
    return cuda_on_cpu::text("%s:%d (line %d of the PTX)", site.file, site.line, site.ptx_line);
}
void misaligned(const char *space, u64 address, size_t bytes, const Site &site) {
    fail("misaligned access to %s memory: %zu bytes at 0x%llx, in %s", space, bytes, (unsigned long long)address,
         where(site).c_str());
}
void out_of_shared(u32 address, size_t bytes, const Site &site) {
    fail("out of bounds: %zu bytes at byte %u of shared memory, in %s", bytes, address, where(site).c_str());
}
void out_of_range(const char *space, u64 address, size_t bytes, Range range, const Site &site) {
    fail("out of bounds: %zu bytes at byte %lld of %zu of %s memory, in %s", bytes,
         (long long)(address - (u64)(uintptr_t)range.begin), (size_t)(range.end - range.begin), space,
         where(site).c_str());
}
void trapped(const Site &site) { fail("trap, in %s", where(site).c_str()); }

void find_span(u64 address, size_t bytes, const Site &site) {
    using cuda_on_cpu::Memory;
    const char *pointer = (const char *)(uintptr_t)address;
    cuda_on_cpu::Found found = cuda_on_cpu::find_memory(pointer);
    if (found.kind != Memory::device && found.kind != Memory::pinned)
        fail("access to %s: %zu bytes at 0x%llx, in %s",
             found.kind == Memory::freed ? "freed memory" : "no memory of the device", bytes,
             (unsigned long long)address, where(site).c_str());
    Range range = {found.base, found.base + found.bytes};
    if (pointer + bytes > range.end) out_of_range("global", address, bytes, range, site);
    recent[(size_t)site.ptx_line % spans] = range;
}

} // namespace ptx

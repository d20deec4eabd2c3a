// hopper.cpp: the asynchronous instructions of sm_90a, on memory and fibers of the host (hopper.h).
#include "hopper.h"
#include "wgmma_layout.h"
#include <algorithm>
#include <cuda.h>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace ptx {

WordState *word_states;

using cuda_on_cpu::text;

namespace {

enum { DIMENSIONS = 3, DEPTH = 16 }; // of tensors; of a wgmma

// ---------------------------------------------------------------------------------------------------------------------
// shared memory between threads and the asynchronous proxy

struct Fences { // of a thread
    u64 last;   // number of its last fence
    int passed; // barriers of the block that the thread has passed
};
Fences fences[1024];
u64 writes;          // of threads to shared memory, counted
int fenced_barriers; // writes before this barrier of the block are visible to the asynchronous proxy
std::vector<WordState> states;

template <class F> void each_word(u32 address, u32 bytes, F f) {
    for (u32 i = address / 4; i <= (address + bytes - 1) / 4; i++) f(word_states[i]);
}
// While a bulk copy to a word is under way nothing else may use it; while a wgmma reads it, nothing may write.
void check_use(const WordState &s, u32 address, bool writes_it, const Site &site) {
    if (writes_it && s.readers)
        fail("byte %u of shared memory is written in %s while wgmma in %s reads it", address, where(site).c_str(),
             where(*s.reader).c_str());
    if (s.copied_to)
        fail("byte %u of shared memory is %s in %s while the bulk copy of %s is under way", address,
             writes_it ? "written" : "read", where(site).c_str(), where(*s.site).c_str());
}
// An access of a bulk copy or a product.
void asynchronous_access(u32 address, u32 bytes, bool writes_it, const Site &site) {
    if ((u64)address + bytes > shared_bytes || !shared_usable[address] || !shared_usable[address + bytes - 1])
        out_of_shared(address, bytes, site);
    each_word(address, bytes, [&](const WordState &s) {
        check_use(s, address, writes_it, site);
        if (s.site && !s.copied_to && s.written > fences[s.thread].last && s.barriers >= fenced_barriers)
            fail("fence.proxy.async is missing: shared memory at byte %u, which %s accesses, was written in %s",
                 address, where(site).c_str(), where(*s.site).c_str());
    });
}

} // namespace

void thread_access(u32 address, u32 bytes, bool writes_it, const Site &site) {
    int thread = cuda_on_cpu::thread_number();
    each_word(address, bytes, [&](WordState &s) {
        check_use(s, address, writes_it, site);
        if (writes_it) s = {++writes, &site, fences[thread].passed, (s16)thread, false, 0, nullptr};
    });
}
void passed_barrier() { fences[cuda_on_cpu::thread_number()].passed++; }
void proxy_fence() {
    Fences &own = fences[cuda_on_cpu::thread_number()];
    own.last = writes;
    fenced_barriers = std::max(fenced_barriers, own.passed);
}

// ---------------------------------------------------------------------------------------------------------------------
// mbarrier

namespace {

struct Barrier {
    u32 count, missing;
    s64 bytes; // announced, less those that have come
    u64 phase;
};
std::map<u32, Barrier> barriers;

Barrier &barrier_at(u32 address, const Site &site) {
    shared<8>(address, site);
    auto found = barriers.find(address);
    if (found == barriers.end()) fail("no mbarrier at byte %u of shared memory, in %s", address, where(site).c_str());
    return found->second;
}
void end_phase(Barrier &b) {
    if (b.missing || b.bytes) return;
    b.phase++;
    b.missing = b.count;
}

} // namespace

void barrier_init(u32 address, u32 count, const Site &site) {
    shared<8>(address, site);
    if (count < 1 || count >= 1 << 20) fail("mbarrier.init for %u arrivals, in %s", count, where(site).c_str());
    if (!barriers.insert({address, {count, count, 0, 0}}).second)
        fail("mbarrier.init of an mbarrier that is in use, in %s", where(site).c_str());
    thread_access(address, 8, true, site);
}
u64 barrier_arrive(u32 address, u32 expected_bytes, const Site &site) {
    Barrier &b = barrier_at(address, site);
    b.bytes += expected_bytes;
    if (b.bytes >= 1 << 20) fail("expect_tx of 2^20 bytes or more, in %s", where(site).c_str());
    if (!b.missing) fail("an arrival at an mbarrier that lacks none, in %s", where(site).c_str());
    u64 phase = b.phase;
    b.missing--;
    end_phase(b);
    return phase;
}
bool barrier_wait(u32 address, u32 parity, const Site &site) {
    if (parity > 1) fail("parity %u of an mbarrier, in %s", parity, where(site).c_str());
    barrier_at(address, site);
    cuda_on_cpu::wait_until([&] { return (barrier_at(address, site).phase & 1) != parity; },
                            [&] {
                                const Barrier &b = barriers[address];
                                return text("in mbarrier.try_wait for parity %u in %s: its phase lacks %u arrivals and "
                                            "%lld bytes",
                                            parity, where(site).c_str(), b.missing, (long long)b.bytes);
                            });
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// bulk copies

namespace {

struct Piece {
    u32 shared;
    u32 bytes;
    u64 global; // 0: outside of the tensor
};
struct Copy {
    std::vector<Piece> pieces;
    u32 barrier, bytes;
    const Site *site;
};
std::vector<Copy> copies; // under way

// What cuTensorMapEncodeTiled makes: a tensor of bf16, the innermost dimension first.
struct TensorMap {
    u64 mark, address, strides[DIMENSIONS - 1]; // of dimensions 1 and later, in bytes
    u32 sizes[DIMENSIONS];
    u16 box[DIMENSIONS];
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "a tensor map has 128 bytes");
constexpr u64 tensor_map_mark = 0x70616D20726F7365;

void land(const Copy &copy) {
    for (const Piece &p : copy.pieces) {
        each_word(p.shared, p.bytes, [](WordState &s) { s.site = nullptr, s.copied_to = false; });
        if (p.global) memcpy(shared_memory + p.shared, (const void *)(uintptr_t)p.global, p.bytes);
        else memset(shared_memory + p.shared, 0, p.bytes);
    }
    Barrier &b = barrier_at(copy.barrier, *copy.site);
    b.bytes -= copy.bytes;
    end_phase(b);
}
void start(Copy copy) {
    for (const Piece &p : copy.pieces) {
        asynchronous_access(p.shared, p.bytes, true, *copy.site);
        if (p.global) find_span(p.global, p.bytes, *copy.site);
        copy.bytes += p.bytes;
    }
    asynchronous_access(copy.barrier, 8, false, *copy.site);
    if (!cuda_on_cpu::lands_late()) return land(copy);
    for (const Piece &p : copy.pieces)
        each_word(p.shared, p.bytes, [&](WordState &s) { s.site = copy.site, s.copied_to = true; });
    copies.push_back(std::move(copy));
}
bool land_a_load() {
    if (copies.empty()) return false;
    Copy copy = std::move(copies[0]);
    copies.erase(copies.begin());
    land(copy);
    return true;
}
} // namespace

void bulk_load(u32 to, u64 from, u32 bytes, u32 barrier, const Site &site) {
    if ((to | from | bytes) % 16 || !bytes)
        fail("cp.async.bulk of %u bytes from 0x%llx to byte %u of shared memory: multiples of 16 are required, in %s",
             bytes, (unsigned long long)from, to, where(site).c_str());
    start({{{to, bytes, from}}, barrier, 0, &site});
}

// The elements of a box: bytes in shared memory from `to` on, and in the tensor.
void bulk_load(u32 to, const Tile &from, u32 barrier, const Site &site) {
    const std::string place = where(site);
    constexpr u32 element = 2;
    Copy copy = {{}, barrier, 0, &site};
    TensorMap map;
    memcpy(&map, (const void *)(uintptr_t)from.map, sizeof(map)); // cudaMalloc and parameters: a pointer of the host
    if (from.map % 64 || map.mark != tensor_map_mark)
        fail("no tensor map, or not at a multiple of 64, in %s", place.c_str());
    if (from.first.size() != DIMENSIONS)
        fail("%zu coordinates of a tensor of %d dimensions, in %s", from.first.size(), (int)DIMENSIONS, place.c_str());
    if (to % 128) fail("a box at byte %u of shared memory, which is not a multiple of 128, in %s", to, place.c_str());
    u32 count = 1;
    for (u16 size : map.box) count *= size;
    for (u32 i = 0; i < count; i++) {
        u64 address = map.address;
        bool inside = true;
        u32 rest = i;
        for (int d = 0; d < DIMENSIONS; rest /= map.box[d++]) {
            s64 at = (s64)(s32)from.first.begin()[d] + rest % map.box[d];
            inside = inside && at >= 0 && at < map.sizes[d];
            address += (u64)at * (d ? map.strides[d - 1] : element);
        }
        u32 place_in_shared = swizzled(to + i * element);
        Piece *last = copy.pieces.empty() ? nullptr : &copy.pieces.back();
        if (last && last->shared + last->bytes == place_in_shared &&
            (inside ? last->global && last->global + last->bytes == address : !last->global))
            last->bytes += element;
        else copy.pieces.push_back({place_in_shared, element, inside ? address : 0});
    }
    start(copy);
}

// ---------------------------------------------------------------------------------------------------------------------
// wgmma

namespace {

struct Product {
    Operands what;
    const Site *site;
    int group;
    std::vector<float *> d[32]; // registers of each lane
    std::vector<u32 *> a[32];
};
struct Lane {
    size_t issued, waited; // products of its warp: of this lane, and of these the ones that it need not wait for
    int groups;            // committed
    bool fenced;           // at least once
    std::set<const void *> touched; // registers, since the last wgmma.fence
};
std::vector<Product> products[32]; // of a warp, since the start of the block
size_t computed[32], released[32]; // of them, in order: has results, no longer reads shared memory
Lane lanes[1024];
int waiting_threads; // for products that take place as late as possible
u64 idle_rounds;     // times when no thread could run, and some waited for products

Matrix matrix_of(u64 d, bool transposed, const Site &site) {
    Matrix m(d, transposed);
    if (!Matrix::valid(d))
        fail("reserved bits, a base offset, or another swizzle than of 128 bytes in the matrix descriptor 0x%llx, in "
             "%s",
             (unsigned long long)d, where(site).c_str());
    if ((m.start >> 7 & 7) || m.stride % 1024)
        fail("the matrix descriptor 0x%llx has its start at %u and a stride of %u bytes, which its swizzle does not "
             "allow, in %s",
             (unsigned long long)d, m.start, m.stride, where(site).c_str());
    return m;
}
// Calls f for each 16 bytes of shared memory that a warp reads for a product.
template <class F> void each_operand(const Product &p, int warp, F f) {
    for (int of_b = p.what.a_in_registers; of_b < 2; of_b++) {
        Matrix m = matrix_of(of_b ? p.what.b : p.what.a, of_b ? p.what.transpose_b : p.what.transpose_a, *p.site);
        u32 first = of_b ? 0 : (u32)warp % 4 * 16, rows = of_b ? (u32)p.what.n : 16;
        for (u32 row = first; row < first + rows; row += m.transposed ? 8 : 1)
            for (u32 k = 0; k < DEPTH; k += m.transposed ? 1 : 8) f(m.byte(row, k));
    }
}

// The part of a warp: 16 rows of A, and all of B.
void compute(const Product &p, u32 warp) {
    const u32 n = (u32)p.what.n, first = warp % 4 * 16;
    std::vector<float> a(16 * DEPTH), b(n * DEPTH);
    for (u32 lane = 0; lane < 32 && p.what.a_in_registers; lane++)
        for (u32 i = 0; i < 8; i++) {
            Coordinates at = element_of_a(lane, i);
            a[at.row * DEPTH + at.column] = from_bf16((u16)(*p.a[lane][i / 2] >> 16 * (i % 2)));
        }
    auto read = [&](std::vector<float> &to, u64 descriptor, bool transposed, u32 row) {
        Matrix m = matrix_of(descriptor, transposed, *p.site);
        for (u32 i = 0; i < to.size(); i++)
            to[i] = from_bf16(load<u16, 1>(shared_memory + m.byte(row + i / DEPTH, i % DEPTH)).v[0]);
    };
    if (!p.what.a_in_registers) read(a, p.what.a, p.what.transpose_a, first);
    read(b, p.what.b, p.what.transpose_b, 0);
    for (u32 lane = 0; lane < 32; lane++)
        for (u32 i = 0; i < n / 2; i++) {
            Coordinates at = element_of_d(lane, i);
            float sum = 0;
            for (u32 k = 0; k < DEPTH; k++) sum += a[at.row * DEPTH + k] * b[at.column * DEPTH + k];
            sum *= (float)(p.what.scale_a * p.what.scale_b);
            *p.d[lane][i] = p.what.accumulate ? *p.d[lane][i] + sum : sum;
        }
}
void compute_until(int warp, size_t end) {
    for (size_t &i = computed[warp]; i < end; i++) compute(products[warp][i], (u32)warp);
}

bool same(const Operands &x, const Operands &y) {
    return x.a == y.a && x.b == y.b && x.accumulate == y.accumulate && x.n == y.n;
}
int whole_warp(const Site &site) { // returns its number
    warp_barrier(~0u, site);
    return cuda_on_cpu::thread_number() / 32;
}

} // namespace

void wgmma(const Operands &what, std::initializer_list<float *> d, std::initializer_list<u32 *> a, const Site &site) {
    int thread = cuda_on_cpu::thread_number(), warp = thread / 32;
    Lane &lane = lanes[thread];
    if ((int)d.size() != what.n / 2 || a.size() != (what.a_in_registers ? 4 : 0))
        fail("wgmma with %zu and %zu registers, in %s", d.size(), a.size(), where(site).c_str());
    if (lane.issued == products[warp].size()) {
        products[warp].push_back({what, &site, lane.groups, {}, {}});
        each_operand(products[warp].back(), warp, [&](u32 address) {
            asynchronous_access(address, 16, false, site);
            each_word(address, 16, [&](WordState &s) { s.readers++, s.reader = &site; });
        });
    }
    for (int w = warp / 4 * 4; w < warp / 4 * 4 + 4; w++) // of the warpgroup
        if (lane.issued < products[w].size() &&
            (products[w][lane.issued].site->ptx_line != site.ptx_line || !same(products[w][lane.issued].what, what)))
            fail("the threads of a warpgroup execute different wgmma, in %s and %s", where(site).c_str(),
                 where(*products[w][lane.issued].site).c_str());
    size_t number = lane.issued++;
    products[warp][number].d[thread % 32] = d;
    products[warp][number].a[thread % 32] = a;
    auto was_touched = [&](const void *pointer) { return lane.touched.count(pointer) > 0; };
    if (!lane.fenced || std::any_of(d.begin(), d.end(), was_touched) || std::any_of(a.begin(), a.end(), was_touched))
        fail("wgmma.fence is missing: before wgmma in %s its registers were accessed, or it is the first",
             where(site).c_str());
    whole_warp(site);
    if (number >= computed[warp] && thread % 32 == 0 && !cuda_on_cpu::lands_late()) compute_until(warp, number + 1);
}
void wgmma_fence(const Site &site) {
    whole_warp(site);
    Lane &lane = lanes[cuda_on_cpu::thread_number()];
    lane.fenced = true;
    lane.touched.clear();
}
void wgmma_commit(const Site &site) {
    whole_warp(site);
    lanes[cuda_on_cpu::thread_number()].groups++;
}
void wgmma_wait(int groups_left, const Site &site) {
    int warp = whole_warp(site);
    Lane &lane = lanes[cuda_on_cpu::thread_number()];
    while (lane.waited < lane.issued && products[warp][lane.waited].group < lane.groups - groups_left) lane.waited++;
    if (computed[warp] < lane.waited) {
        u64 round = idle_rounds;
        waiting_threads++;
        cuda_on_cpu::wait_until([&] { return idle_rounds > round; },
                                [&] { return text("in wgmma.wait_group in %s", where(site).c_str()); });
        waiting_threads--;
    }
    compute_until(warp, lane.waited);
    for (; released[warp] < lane.waited; released[warp]++)
        each_operand(products[warp][released[warp]], warp,
                     [](u32 address) { each_word(address, 16, [](WordState &s) { s.readers--; }); });
}
void touched(std::initializer_list<const void *> registers, const Site &site) {
    int thread = cuda_on_cpu::thread_number();
    Lane &lane = lanes[thread];
    for (size_t i = lane.waited; i < lane.issued; i++)
        for (const void *pointer : registers) {
            const Product &p = products[thread / 32][i];
            auto has = [&](const auto &own) { return std::find(own.begin(), own.end(), pointer) != own.end(); };
            if (has(p.d[thread % 32]) || has(p.a[thread % 32]))
                fail("wgmma.wait_group is missing: a register of wgmma in %s is accessed in %s", where(*p.site).c_str(),
                     where(site).c_str());
        }
    lane.touched.insert(registers);
}

// ---------------------------------------------------------------------------------------------------------------------
// setmaxnreg

namespace {
int registers_of[32]; // of each thread of a warp, once it has set them
}
void set_registers(bool more, int count, const Site &site) {
    const char *name = more ? "setmaxnreg.inc" : "setmaxnreg.dec";
    int warp = whole_warp(site), before = registers_of[warp];
    if (count < 24 || count > 256 || count % 8)
        fail("%s of %d: a multiple of 8 from 24 to 256 is required, in %s", name, count, where(site).c_str());
    if (before && (more ? count < before : count > before))
        fail("%s to %d registers of %d, in %s", name, count, before, where(site).c_str());
    registers_of[warp] = count;
}

// ---------------------------------------------------------------------------------------------------------------------
// blocks

namespace {

bool work_while_idle() {
    if (!waiting_threads) return land_a_load();
    idle_rounds++;
    return true;
}

void end_hopper_block() {
    while (land_a_load()) {
    }
    for (const auto &[address, b] : barriers)
        if (b.bytes)
            fail("an mbarrier at byte %u of shared memory lacks %lld bytes at the end of its block", address,
                 (long long)b.bytes);
    for (int t = 0; t < 1024; t++) {
        if (lanes[t].waited < lanes[t].issued)
            fail("wgmma in %s is not waited for", where(*products[t / 32][lanes[t].waited].site).c_str());
        if (lanes[t].issued != lanes[t / 128 * 128].issued || registers_of[t / 32] != registers_of[t / 128 * 4])
            fail("the warps of a warpgroup execute wgmma or setmaxnreg in different numbers");
    }
}

} // namespace

void begin_hopper_block(bool asynchronous) {
    word_states = nullptr;
    cuda_on_cpu::block_ends = asynchronous ? end_hopper_block : nullptr;
    cuda_on_cpu::when_idle = asynchronous ? work_while_idle : nullptr;
    if (!asynchronous) return;
    states.assign(shared_bytes / 4 + 1, {});
    word_states = states.data();
    barriers.clear();
    copies.clear();
    std::fill(std::begin(fences), std::end(fences), Fences{});
    std::fill(std::begin(lanes), std::end(lanes), Lane{});
    std::fill(std::begin(computed), std::end(computed), (size_t)0);
    std::fill(std::begin(released), std::end(released), (size_t)0);
    for (auto &of_warp : products) of_warp.clear();
    writes = 0, fenced_barriers = 0;
    std::fill(std::begin(registers_of), std::end(registers_of), 0);
}

} // namespace ptx

// ---------------------------------------------------------------------------------------------------------------------
// the driver's function

extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap *to, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                           const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                           const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                           CUtensorMapFloatOOBfill fill) {
    using namespace ptx;
    if (type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || rank != DIMENSIONS || swizzle != CU_TENSOR_MAP_SWIZZLE_128B ||
        fill || interleave)
        fail("cuTensorMapEncodeTiled: a type, rank, swizzle, fill or interleave that is not among those of this layer");
    TensorMap map = {};
    if ((uintptr_t)address % 16 || (uintptr_t)to % 64) return CUDA_ERROR_INVALID_VALUE;
    map.mark = tensor_map_mark, map.address = (u64)(uintptr_t)address;
    for (cuuint32_t d = 0; d < rank; d++) {
        if (sizes[d] < 1 || sizes[d] >= 1ull << 32 || box[d] < 1 || box[d] > 256 || element_strides[d] != 1)
            return CUDA_ERROR_INVALID_VALUE;
        if (d && (strides[d - 1] % 16 || strides[d - 1] >= 1ull << 40)) return CUDA_ERROR_INVALID_VALUE;
        map.sizes[d] = (u32)sizes[d], map.box[d] = (u16)box[d];
        if (d) map.strides[d - 1] = strides[d - 1];
    }
    cuuint32_t inner = box[0] * 2;
    if (inner % 16 || inner > 128) return CUDA_ERROR_INVALID_VALUE;
    memset(to, 0, sizeof(*to));
    memcpy(to, &map, sizeof(map));
    return CUDA_SUCCESS;
}

/*
gemm_table.cuh: a file with the library's algorithm for each product (--tune-gemm).

  {"diffv2_gemm_table": 2, "device": TEXT, "library": TEXT, "storage": "bf16", "products": [
    {"type_a": "stored", "e4m3" or "e5m2", "type_b": the same, "transpose_a": BOOL, "transpose_b": BOOL, "add": BOOL,
     "fp32_out": BOOL, "M": ..., "N": ..., "K": ..., "lda": ...,
     "ldb": ..., "ldc": ..., "align_a": BYTES, "align_b": BYTES, "align_c": BYTES,
     "algorithm": 128 hexadecimal digits, "place": I, "ms": X, "first_ms": X}, ...]}

  algorithm   cublasLtMatmulAlgo_t, which may be stored for the same version of cuBLASLt. place: its rank in the
              library's order, 0 is the first; ms: its time; first_ms: the time of the first
  checks      A table is valid for one device, library and storage type. Numbers are checked for their ranges, and the
              library checks every algorithm.
*/
#ifndef LLMC_GEMM_TABLE_CUH
#define LLMC_GEMM_TABLE_CUH
#include "../base/json.h"
#include "device.cuh"
#include "gemm_shape.cuh"
#ifdef CUDA_ON_CPU
#include <cuda_on_cpu/gemm.h>
#else
#include "gemm_cublaslt.cuh"
#endif

typedef struct {
    GemmProblem problem;
    GemmAlgorithm algorithm;
    int place; // this and the times are informative
    double ms, first_ms;
} GemmEntry;

enum { GEMM_TABLE_VERSION = 2, GEMM_TABLE_ENTRIES = 1024, GEMM_NUMBERS = 9 };
static struct {
    bool measuring;
    int count, missed; // missed: products without an entry
    GemmEntry entries[GEMM_TABLE_ENTRIES];
} gemm_table;

// The conditions of a table's validity: keys of the file and their values here.
typedef struct {
    const char *key;
    char value[320];
} GemmFact;
static inline void gemm_table_facts(GemmFact facts[3]) {
    cudaDeviceProp device_is = device_properties();
    facts[0].key = "device", facts[1].key = "library", facts[2].key = "storage";
    FORMAT(facts[0].value, "%.250s, %d multiprocessors", device_is.name, device_is.multiProcessorCount);
    FORMAT(facts[1].value, "%s", gemm_library());
    FORMAT(facts[2].value, "%s", sizeof(floatX) == 2 ? "bf16" : "fp32");
}

static const char *const gemm_number_keys[GEMM_NUMBERS] = {"M",   "N",       "K",       "lda",    "ldb",
                                                           "ldc", "align_a", "align_b", "align_c"};
static const char *const gemm_flag_keys[4] = {"transpose_a", "transpose_b", "add", "fp32_out"};
static const char *const gemm_type_keys[2] = {"type_a", "type_b"};
static const char *const gemm_type_names[OPERAND_TYPES] = {"stored", "e4m3", "e5m2"};

static inline char *gemm_table_text(size_t *size) {
    GemmFact facts[3];
    cJSON *json = cJSON_CreateObject();
    gemm_table_facts(facts);
    cJSON_AddNumberToObject(json, "diffv2_gemm_table", GEMM_TABLE_VERSION);
    for (int i = 0; i < 3; i++) cJSON_AddStringToObject(json, facts[i].key, facts[i].value);
    cJSON *products = cJSON_AddArrayToObject(json, "products");
    for (int e = 0; e < gemm_table.count; e++) {
        const GemmEntry *entry = &gemm_table.entries[e];
        const GemmShape *s = &entry->problem.shape;
        const unsigned *align = entry->problem.alignment;
        const bool flags[] = {s->transpose_a, s->transpose_b, s->add, s->fp32_out};
        const double numbers[] = {(double)s->M,   (double)s->N,     (double)s->K,     (double)s->lda,  (double)s->ldb,
                                  (double)s->ldc, (double)align[0], (double)align[1], (double)align[2]};
        char hex[129];
        for (int i = 0; i < 8; i++) snprintf(hex + 16 * i, 17, "%016" PRIx64, entry->algorithm.data[i]);
        cJSON *item = cJSON_CreateObject();
        for (int i = 0; i < 2; i++)
            cJSON_AddStringToObject(item, gemm_type_keys[i], gemm_type_names[entry->problem.types[i]]);
        for (int i = 0; i < 4; i++) cJSON_AddBoolToObject(item, gemm_flag_keys[i], flags[i]);
        for (int i = 0; i < GEMM_NUMBERS; i++) cJSON_AddNumberToObject(item, gemm_number_keys[i], numbers[i]);
        cJSON_AddStringToObject(item, "algorithm", hex);
        cJSON_AddNumberToObject(item, "place", entry->place);
        cJSON_AddNumberToObject(item, "ms", entry->ms);
        cJSON_AddNumberToObject(item, "first_ms", entry->first_ms);
        CHECK(cJSON_AddItemToArray(products, item), "out of memory for a table of products");
    }
    char *text = json_text(json, size);
    cJSON_Delete(json);
    return text;
}

static inline bool gemm_read_algorithm(GemmAlgorithm *algorithm, const char *hex) {
    if (!hex || strlen(hex) != 128 || strspn(hex, "0123456789abcdef") != 128) return false;
    for (int i = 0; i < 8; i++) {
        char word[17] = {0};
        memcpy(word, hex + 16 * i, 16);
        algorithm->data[i] = strtoull(word, NULL, 16);
    }
    return true;
}

// Reads an entry; false if its numbers do not describe a valid product.
static inline bool gemm_read_entry(GemmEntry *entry, const cJSON *item) {
    int numbers[GEMM_NUMBERS];
    bool flags[4];
    memset(entry, 0, sizeof(*entry));
    for (int i = 0; i < GEMM_NUMBERS; i++) {
        uint64_t value = 0;
        if (!json_size(cJSON_GetObjectItemCaseSensitive(item, gemm_number_keys[i]), &value)) return false;
        if (value < 1 || value > INT_MAX || (i >= 6 && (value > 256 || (value & (value - 1))))) return false;
        numbers[i] = (int)value;
    }
    for (int i = 0; i < 4; i++) {
        const cJSON *flag = cJSON_GetObjectItemCaseSensitive(item, gemm_flag_keys[i]);
        if (!cJSON_IsBool(flag)) return false;
        flags[i] = cJSON_IsTrue(flag);
    }
    for (int i = 0; i < 2; i++) {
        const char *name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, gemm_type_keys[i]));
        int type = 0;
        while (type < OPERAND_TYPES && !(name && strcmp(name, gemm_type_names[type]) == 0)) type++;
        if (type == OPERAND_TYPES) return false;
        entry->problem.types[i] = (OperandType)type;
    }
    if ((entry->problem.types[0] == OPERAND_STORED) != (entry->problem.types[1] == OPERAND_STORED)) return false;
    GemmShape s = {flags[0],   flags[1],   flags[2],   flags[3],   numbers[0],
                   numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]};
    entry->problem.shape = s;
    for (int i = 0; i < 3; i++) entry->problem.alignment[i] = (unsigned)numbers[6 + i];
    const cJSON *algorithm = cJSON_GetObjectItemCaseSensitive(item, "algorithm");
    return s.lda >= (s.transpose_a ? s.M : s.K) && s.ldb >= (s.transpose_b ? s.K : s.N) && s.ldc >= s.N &&
           gemm_read_algorithm(&entry->algorithm, cJSON_GetStringValue(algorithm));
}

// Whether the library computes the entry's product with its algorithm.
static inline bool gemm_entry_works(const GemmEntry *entry) {
    GemmHandles handles;
    gemm_describe(&handles, &entry->problem);
    bool works = gemm_accepts(&handles, &entry->problem, &entry->algorithm) &&
                 gemm_may_split(&entry->problem, gemm_parts_of_k(&entry->algorithm));
    gemm_forget(&handles);
    return works;
}

// Loads a table. On failure `why` is the reason.
static inline bool gemm_table_read(const char *text, size_t size, char *why, size_t why_size) {
    GemmFact facts[3];
    double version = 0;
    cJSON *json = cJSON_ParseWithLength(text, size);
    const cJSON *products = cJSON_GetObjectItemCaseSensitive(json, "products"), *item;
    int count = cJSON_IsArray(products) ? cJSON_GetArraySize(products) : -1;
    snprintf(why, why_size, "it is not a table of matrix products");
    bool good = json_get_number(json, "diffv2_gemm_table", &version) && count >= 0 && count <= GEMM_TABLE_ENTRIES;
    if (good && version != GEMM_TABLE_VERSION) {
        snprintf(why, why_size, "it is a table of version %g, and this program reads version %d", version,
                 GEMM_TABLE_VERSION);
        good = false;
    }
    gemm_table_facts(facts);
    for (int i = 0; good && i < 3; i++) {
        const char *made_for = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, facts[i].key));
        good = made_for && printable(made_for) && strcmp(made_for, facts[i].value) == 0;
        if (!good)
            snprintf(why, why_size, "its %s is '%.100s', not '%s'", facts[i].key,
                     made_for && printable(made_for) ? made_for : "?", facts[i].value);
    }
    gemm_table.measuring = false;
    gemm_table.count = gemm_table.missed = 0;
    if (good) cJSON_ArrayForEach(item, products) {
            GemmEntry *entry = &gemm_table.entries[gemm_table.count];
            good = gemm_read_entry(entry, item) && gemm_entry_works(entry);
            if (!good)
                snprintf(why, why_size, "its product %d is damaged, or the library refuses it", gemm_table.count);
            if (!good) break;
            gemm_table.count++;
        }
    cJSON_Delete(json);
    return good;
}
#endif

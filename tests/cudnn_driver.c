/*
cudnn_driver.c: a libcuda.so.1 for machines without a GPU. cuDNN loads into the driver what it has compiled; this one
takes it and forgets it, so that a plan for another machine's device is made to its end (tests/cudnn_plans.cpp). Nothing
can be run with it, and the CUDA runtime finds no device.
*/
static char anything;

#define TAKES(name)         \
    int name(void **what) { \
        *what = &anything;  \
        return 0;           \
    }
#define AGREES(name) \
    int name(void) { return 0; }
#define REFUSES(name) \
    int name(void) { return 100; } // CUDA_ERROR_NO_DEVICE

TAKES(cuLibraryLoadData)
TAKES(cuLibraryGetKernel)
TAKES(cuKernelGetFunction)
TAKES(cuModuleLoadData)
TAKES(cuModuleLoadDataEx)
TAKES(cuModuleGetFunction)
AGREES(cuKernelSetAttribute)
AGREES(cuFuncSetAttribute)
AGREES(cuLibraryUnload)
AGREES(cuModuleUnload)
// what is only looked up
REFUSES(cuInit)
REFUSES(cuDriverGetVersion)
REFUSES(cuGetErrorName)
REFUSES(cuGetErrorString)
REFUSES(cuDeviceGet)
REFUSES(cuDeviceGetCount)
REFUSES(cuDeviceGetAttribute)
REFUSES(cuDevicePrimaryCtxRetain)
REFUSES(cuDevicePrimaryCtxRelease)
REFUSES(cuDevicePrimaryCtxReset)
REFUSES(cuCtxGetCurrent)
REFUSES(cuCtxGetDevice)
REFUSES(cuCtxGetLimit)
REFUSES(cuCtxPushCurrent)
REFUSES(cuCtxPopCurrent)
REFUSES(cuStreamGetCtx)
REFUSES(cuStreamSynchronize)
REFUSES(cuLibraryLoadFromFile)
REFUSES(cuModuleLoadFatBinary)
REFUSES(cuModuleGetGlobal_v2)
REFUSES(cuKernelGetAttribute)
REFUSES(cuFuncGetAttribute)
REFUSES(cuLinkCreate)
REFUSES(cuLinkCreate_v2)
REFUSES(cuLinkAddData)
REFUSES(cuLinkAddData_v2)
REFUSES(cuLinkAddFile_v2)
REFUSES(cuLinkComplete)
REFUSES(cuLinkDestroy)
REFUSES(cuLaunchKernel)
REFUSES(cuLaunchKernelEx)
REFUSES(cuLaunchCooperativeKernel)
REFUSES(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSES(cuOccupancyMaxPotentialClusterSize)
REFUSES(cuTensorMapEncodeIm2col)
REFUSES(cuTensorMapEncodeTiled)
REFUSES(cuMemcpyDtoH_v2)

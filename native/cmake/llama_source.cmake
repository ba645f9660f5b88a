# Unpacks the pinned llama.cpp into the build folder and applies native/patches (not for stock).
set(LLAMA_CPP_DIR ${CMAKE_BINARY_DIR}/source)
set(source_args --dest ${LLAMA_CPP_DIR})
if (NOT EXPERT_PACK_STOCK)
    list(APPEND source_args --patches ${CMAKE_CURRENT_SOURCE_DIR}/patches)
endif()
execute_process(
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/llama_source.py ${source_args}
    RESULT_VARIABLE source_failed OUTPUT_VARIABLE LLAMA_CPP_PIN OUTPUT_STRIP_TRAILING_WHITESPACE)
if (source_failed)
    message(FATAL_ERROR "the llama.cpp source could not be prepared; the line above says why")
endif()
file(GLOB patch_files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/patches/*.patch)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    ${patch_files} ${CMAKE_CURRENT_SOURCE_DIR}/llama_source.py ${CMAKE_CURRENT_SOURCE_DIR}/../pyproject.toml)
